"""What one rank does for one microbatch, block by block: products, memory traffic, kernels, collectives, saved values, parameters.

Every amount is a + b · samples: a value either has the batch among its atoms or it has not, so that one capture, of any batch, holds for
microbatches of any size. Nothing here has a price yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

from autopar.cost.hardware.links import CommunicationKind


@dataclass(frozen=True)
class Amount:
    """FLOPs or bytes: `fixed + per_sample · samples`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def of(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.fixed - other.fixed, self.per_sample - other.per_sample)


@dataclass(frozen=True)
class Product:
    """A contraction: a matrix product or a convolution. One of two activations is attention's, be it written out or, with three operands
    or more, fused with all that is between its products."""

    flops: Amount
    bytes: Amount
    is_attention: bool
    is_fused_attention: bool = False


@dataclass(frozen=True)
class Transfer:
    """A collective over `axes`; the sizes are its local input and output in bytes."""

    collective: CommunicationKind
    axes: tuple[str, ...]
    input: Amount
    output: Amount


@dataclass
class Part:
    """The calls of one block in one phase. Traffic and kernels are those of all but products: call by call ("eager"), and with chains of
    calls between two products or collectives as one kernel that reads and writes once ("fused")."""

    products: list[Product] = field(default_factory=list[Product])
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    eager_bytes: Amount = Amount()
    fused_bytes: Amount = Amount()
    eager_kernels: int = 0
    fused_kernels: int = 0

    @property
    def flops(self) -> Amount:
        return sum((each.flops for each in self.products), Amount())


@dataclass
class Block:
    """A layer, or what stands before, between and after layers; `count` equal ones follow each other.

    `core` is the part of the forward that selective recomputation runs again: from the first product of two activations to the last.
    `saved` is what the forward keeps for the backward, `saved_outside_core` the same without what `core` makes, `inputs` what comes in from
    blocks before (all that full recomputation keeps), `gathered` what of `saved` is left out where parts are kept and gathered again.
    `parameters` counts elements that a rank holds by name, `itemsize` bytes of each. `gradient_sums` run once a step and not for every
    microbatch: sums over tp of gradients that no sample is a dim of, to which all microbatches add first.
    """

    name: str
    count: int = 1
    forward: Part = field(default_factory=Part)
    input_gradient: Part = field(default_factory=Part)
    weight_gradient: Part = field(default_factory=Part)
    core: Part = field(default_factory=Part)
    gradient_sums: list[Transfer] = field(default_factory=list[Transfer])
    saved: Amount = Amount()
    saved_outside_core: Amount = Amount()
    inputs: Amount = Amount()
    gathered: Amount = Amount()
    parameters: dict[str, float] = field(default_factory=dict[str, float])
    # Bytes a sample of what forward or backward makes and drops, at most at a time: op by op, and with chains as one kernel.
    eager_working: float = 0.0
    fused_working: float = 0.0
    # Of what comes before the first layer and after the last one: what a stage partition counts them as is the profile's.
    is_layer: bool = False

    @property
    def num_parameters(self) -> float:
        return sum(self.parameters.values())


@dataclass(frozen=True)
class ModelWork:
    """The blocks of a model in order, as each rank along `tp` runs them. What `mixes_samples` computes something else on microbatches.

    Where the plan splits less than tp's ranks (two heads over four) transfers go over sub-axes of it, tp.0 and tp.1, of sizes `tp_parts`.
    """

    blocks: tuple[Block, ...]
    itemsize: int
    mixes_samples: bool = False
    tp_parts: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.blocks if block.is_layer)

    def expanded(self) -> list[Block]:
        """Equal blocks as often as they are there: a layer each time behind what stands before it."""
        found: list[Block] = []
        for block, following in zip_longest(self.blocks, self.blocks[1:]):
            if block.is_layer and found and not found[-1].is_layer and found[-1].count == block.count:
                found += [block, *((block.count - 1) * [found[-1], block])]
            elif not block.is_layer and following is not None and following.is_layer and following.count == block.count:
                found.append(block)
            else:
                found += block.count * [block]
        return found

    @cached_property
    def model_flops(self) -> Amount:
        """Of the products of forward and backward of a microbatch, recomputation left out."""
        parts = [part for each in self.expanded() for part in (each.forward, each.input_gradient, each.weight_gradient)]
        return sum((part.flops for part in parts), Amount())
