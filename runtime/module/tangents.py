"""What backward begins from, which users make of outputs on each rank by themselves: where ranks compute one loss together it must be the
same, and of losses of their own each counts the same.

(lam * parallel(x)).backward()      lam drawn by each rank: a stage, or a shard of a weight, would have its own factor, in silence
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.errors import InputError
from autopar.ir.program import Signature
from autopar.runtime._torch import has_values
from autopar.runtime.execute.world import World

logger = logging.getLogger("autopar")

# The gradients of results, by flat index of these.
Tangents = Mapping[str, torch.Tensor | None]
# Elements of a tangent that are compared. Where ranks draw apart, or compute another loss, any few of them tell.
_MOST = 65_536
# Of what the elements' sizes sum up to: ranks may compute a loss in other orders of sums.
_TOLERANCE = 1e-3


@dataclass
class TangentCheck:
    """Of one captured program: compared in its first backward, and in each whose tangents are known not to be those of all ranks."""

    is_done: bool = False

    def of(self, tangents: Tangents, world: World, are_equal: bool) -> None:
        are_shared = world.mesh.size > world.mesh.num_shares  # several ranks compute one loss
        if not world.is_virtual and (not self.is_done or (are_shared and not are_equal)):
            check_tangents(tangents, world)
        self.is_done = True


def is_known(tangent: torch.Tensor) -> bool:
    """Whether it is of one element, on the host: nobody waits for a device to see it."""
    return tangent.device.type == "cpu" and tangent.numel() == 1 and has_values(tangent)


def number_of(tangents: Tangents) -> int:
    """What tells tangents from others of the same program: which results have one, and the values of those of one element on the host,
    where nothing waits for them. Of 56 bits."""
    values = {name: None if each is None else each.item() if is_known(each) else () for name, each in tangents.items()}
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7])


def check_tangents(tangents: Tangents, world: World) -> None:
    """Compare what backward begins from among ranks at equal places along dp, which compute one loss together; collective.

    Raises `InputError` on every rank. The ranks of a pipeline, or along tp, would each scale their own part of the gradients.
    """
    everyone = world.gather({name: _summary(tangent) for name, tangent in tangents.items()})
    for name in tangents:
        seen: dict[int, int] = {}
        for rank, summaries in enumerate(everyone):
            other = seen.setdefault(world.mesh.index(rank, world.mesh.parts("dp")), rank)
            if not _is_alike(everyone[other][name], summaries[name]):
                one, two = (_said(each[name]) for each in (everyone[other], summaries))
                raise InputError(
                    f"ranks {other} and {rank} compute one loss together, and begin backward from other gradients of it: {one} and {two}\n"
                    "A factor of the loss (a mixup weight, say), and what is computed of outputs, must be the same on ranks of one share "
                    "of the batch: draw it by a generator of its own that they seed alike, torch.Generator().manual_seed(seed + "
                    "mesh.get_local_rank('dp')), or seed all ranks alike"
                )


def _summary(tangent: torch.Tensor | None) -> tuple[float, float]:
    """What the sizes of its elements sum up to, and the elements themselves, each with a factor of its place. None is as good as zeros:
    one rank may add a loss that it does not count, by a factor of zero, and another leave it out."""
    if tangent is None or not has_values(tangent):
        return 0.0, 0.0
    some = tangent.detach()
    for dim, size in enumerate(some.shape):
        if some.numel() > _MOST:
            some = some.narrow(dim, 0, max(1, size * _MOST // some.numel()))
    some = torch.view_as_real(some.resolve_conj()) if some.is_complex() else some
    values = some.flatten().double().cpu().nan_to_num(0.0, 1e30, -1e30)
    factors = torch.arange(len(values), dtype=torch.float64).cos()
    return float(values.abs().sum()), float(values @ factors)


def _is_alike(one: tuple[float, float], two: tuple[float, float]) -> bool:
    return all(abs(a - b) <= _TOLERANCE * max(one[0], two[0]) for a, b in zip(one, two, strict=True))


def _said(summary: tuple[float, float]) -> str:
    return f"of sum {summary[0]:.6g}" if summary[0] != abs(summary[1]) else f"{summary[1]:.6g}"


def tell_of_unequal_shares(signature: Signature, world: World) -> None:
    """Warn, on rank 0, that ranks of unequal numbers of samples, which compute losses of their own of outputs, count the same each."""
    shares = next((item.shares for item in signature.inputs_of("tangent") if len(set(item.shares)) > 1), ())
    if shares and world.ranks[0] == 0:
        logger.warning(
            "ranks along dp pass %s samples, and the model gives no loss: where each computes one of its own outputs, gradients are those "
            "of the mean of these losses, as with DDP, in which a rank of fewer samples counts the same. For the loss of the global batch "
            "return it from forward, or multiply each rank's mean by its samples * %d / %d",
            ", ".join(map(str, shares)),
            len(shares),
            sum(shares),
        )
