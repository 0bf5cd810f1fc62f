"""A batch that the ranks, or the microbatches, do not divide is padded: the last one of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch.fx import Node

from autopar.ir.keys import BATCH, DIMS
from autopar.ir.padding import Padding
from autopar.ir.program import Input, Output, Program
from autopar.ir.sharding import atoms_of_dim, flat
from autopar.ir.shares import UnequalShares
from autopar.ops.atom_classes import Atom, AtomClasses
from autopar.ops.padded_ops import with_atoms
from autopar.ops.strategies import shared_atoms
from autopar.partition.pad_graph import padded_program
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.pad_atoms import PaddingDecision, share_of_padded
from autopar.plans.json import Json, to_dims

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class PadBatch:
    """Pad the samples to a multiple of ranks along dp times microbatches, at their end.

    The model was captured with the true number of samples, so every mean, count and position in the program is of these; what is padded
    is the graph, as for sizes of the model in `PadAtoms`: before an op reduces the samples, those of the padding are masked. An op that
    cannot be split over the samples runs on the true ones. A single sample has no atom to be padded: every rank computes it.

    `shares` are those of real ranks that pass unequal ones, which inputs, tangents and outputs are then told of.

    Reads: val, the order, the signature's batch dims. Writes: a GLOBAL graph of padded values, `padding`, `shares` and batch dims in the
    signature, DIMS and BATCH. Ensures: no element of the padding reaches a result.
    """

    shares: UnequalShares | None = None
    name: str = "pad batch"

    def decide(self, program: Program) -> PaddingDecision:
        number = program.order.num_microbatches
        needed = program.mesh.num_shares * number
        batches = [item for item in program.signature.inputs_of("batch") if item.batch_dim is not None]
        if all(item.shape[item.batch_dim or 0] % needed == 0 for item in batches):
            return PaddingDecision()
        ranks = program.mesh.ranks
        multiple = ranks.size_of([axis for axis in ranks.names if program.freedom.is_batch(axis)]) * number
        return PaddingDecision(dict(_paddings(FindAtoms().apply(program), needed, multiple)))

    def apply(self, program: Program, decision: PaddingDecision) -> Program:
        if not decision.paddings and not self.shares:
            return program
        program = FindAtoms().apply(program)
        if decision.paddings:
            logger.info("the batch is padded: %s", str(decision).replace("\n", ", "))
            padded = FindAtoms().apply(padded_program(program, decision.paddings, _classes(program), "batch"))
            padded = replace(padded, logical_share=share_of_padded(padded, program))
            cut = [item.name for item, node in padded.named_inputs() if item.padding is not None and DIMS[node][0] != item.padding.after]
            if cut:
                logger.warning("the batch is not padded, and every rank computes all of it: padded, %s would be cut otherwise", cut[0])
            program = program if cut else padded
        return self._with_shares(program, self.shares) if self.shares else program

    def _with_shares(self, program: Program, shares: UnequalShares) -> Program:
        program = program.copy()
        tangents = {item.name: node for item, node in program.named_inputs() if item.kind == "tangent"}
        outputs = tuple(self._output(item, node, tangents.get(item.name), shares) for item, node in program.named_outputs())
        for item in outputs:
            if item.is_whole and item.name in tangents:
                BATCH[tangents[item.name]] = ((),)
        shared = {item.name: item for item in outputs if item.shares}
        inputs = tuple(self._input(item, shared, shares) for item in program.signature.inputs)
        return replace(program, signature=replace(program.signature, inputs=inputs, outputs=outputs))

    def _input(self, item: Input, outputs: Mapping[str, Output], shares: UnequalShares) -> Input:
        if item.kind == "batch" and int(item.name) in shares.sizes:
            return replace(item, shares=shares.sizes[int(item.name)])
        if item.kind == "tangent" and (output := outputs.get(item.name)):
            return replace(item, batch_dim=output.batch_dim, shares=output.shares, views=output.views)
        return item

    def _output(self, item: Output, node: Node, tangent: Node | None, shares: UnequalShares) -> Output:
        """An output lies as its tangent does, which may walk with the batch where it does not itself: behind an op that is not split."""
        if tangent is not None and not shared_atoms(item, node):
            node = tangent
        if item.kind == "output" and (dim := _batch_dim(item, node, shares)) is not None:
            views = _views(node, dim)
            if found := shares.of_size(item.shape[dim] // views):
                return replace(item, batch_dim=dim, shares=found, views=views)
            return replace(item, batch_dim=None, is_whole=True)  # pairs of samples, of which one rank may have half
        return item

    def written(self, program: Program, decision: PaddingDecision) -> dict[str, Json]:
        return {name: (each.before, each.after) for name, each in decision.paddings.items()}

    def read(self, program: Program, value: Mapping[str, Sequence[list[list[int]]]]) -> PaddingDecision:
        return PaddingDecision({name: Padding(to_dims(before), to_dims(after)) for name, (before, after) in value.items()})


def _classes(program: Program) -> AtomClasses:
    """What walks together; a tangent walks with its output."""
    classes = AtomClasses.of(program.graph)
    tangents = {item.name: node for item, node in program.named_inputs() if item.kind == "tangent"}
    for output, node in program.named_outputs():
        if output.kind == "output" and output.name in tangents:
            for position in range(len(flat(DIMS[node][0]))):
                classes.join((node, 0, position), (tangents[output.name], 0, position))
    return classes


def _paddings(program: Program, needed: int, multiple: int) -> Iterator[tuple[str, Padding]]:
    """By batch input, of a program with atoms: the major atom of its samples, and what walks with it, grows to a `multiple` where they are
    not a multiple of what is `needed`."""
    classes, sizes = _classes(program), dict[Atom, int]()
    batches = [(item, node) for item, node in program.named_inputs() if item.kind == "batch"]
    for item, node in batches:
        dims, dim = DIMS[node][0], item.batch_dim
        if dim is not None and dims[dim] and item.shape[dim] % needed:
            sizes[classes.find((node, 0, atoms_of_dim(dims, dim).start))] = -(-dims[dim][0] // multiple) * multiple
    for item, node in batches:
        dims = DIMS[node][0]
        roots = {position: classes.find((node, 0, position)) for position in range(len(flat(dims)))}
        after = with_atoms(dims, {position: sizes[root] for position, root in roots.items() if root in sizes})
        if after != dims:
            yield item.name, Padding(dims, after)


def _views(node: Node, dim: int) -> int:
    """How often all samples come along `dim`: what its atoms before the first that counts them multiply to; all where there is but one."""
    atoms, own = flat(DIMS[node][0]), atoms_of_dim(DIMS[node][0], dim)
    counting = next((atom for atom in own if atom in BATCH[node][0]), own.stop)
    return prod(atoms[own.start : counting])


def _batch_dim(output: Output, node: Node, shares: UnequalShares) -> int | None:
    """The dim of an output that ranks get shares of. Of a single sample no dim has atoms that walk with it: there it is the dim that was
    found to count samples, or the first that could."""
    if shared_atoms(output, node):
        return output.batch_dim
    if output.is_whole or all(sum(each) > 1 for each in shares.sizes.values()):
        return None
    if output.batch_dim is not None:
        return output.batch_dim
    return next((dim for dim, size in enumerate(output.shape) if size == 1), None)
