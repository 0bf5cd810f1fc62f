"""Parameters that ZeRO cannot cut to equal parts are padded where they lie: what is gathered of one is cut to its size again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from autopar.graph.emit import Emitter
from autopar.graph.parameter_readers import read_through, with_copies
from autopar.ir.keys import DIMS, PHASE, Phase
from autopar.ir.padding import Padding
from autopar.ir.program import Input, Output, Program
from autopar.ir.sharding import flat
from autopar.ops.traits import CASTS
from autopar.partition.zero_placements import is_in_parts
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.pad_atoms import KnownPadding

aten = torch.ops.aten


# What is padded although its size divides grows by no more than this.
_LIMIT = 1.25


@dataclass(frozen=True)
class UnevenParameters:
    """By the name of a parameter the dim that is padded, and its size then."""

    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def __str__(self) -> str:
        return "\n".join(f"{name}: dim {dim} has {size} elements" for name, (dim, size) in self.sizes.items()) or "nothing is padded"


@dataclass(frozen=True)
class PadParameters:
    """Pad the longest dim of each parameter that the level of ZeRO wants in parts and of which no atom divides by their number.

        w [10]  →  w [12@dp] → gathered [12] → slice [10], and of its gradient: [10] → padded [12] → reduce-scattered [12@dp]

    A dim that does divide, but none of its atoms (a fused bias of 3 × 12 × 64 over 256 ranks), is padded by a part, so that a slice
    parts its atoms from those of the parameter; it stays whole where that is much of it.

    Nothing but the parameter, its casts and its copy is padded, so that no op has to know. A scalar stays whole.

    `placed` holds what an earlier capture decided, by parameter name: what lies padded is read so, though it is frozen now, which no level
    below 3 wants in parts.

    Reads: DIMS, freedom. Writes: DIMS, BATCH, `padding` in the signature, slices with PHASE. Ensures: every other value is what it was.
    """

    placed: Mapping[str, KnownPadding] = field(default_factory=dict[str, KnownPadding])
    name: str = "pad parameters"

    def decide(self, program: Program) -> UnevenParameters:
        zero, found = program.freedom.zero, dict[str, tuple[int, int]]()
        parts = zero.num_parts(program.mesh) if zero is not None else 1
        for item, node in program.named_inputs():
            if item.kind == "parameter" and item.padding is None and (lies := _as_it_lies(self.placed.get(item.name))):
                found[item.name] = lies
                continue
            if parts == 1 or not is_in_parts(item, program.freedom) or item.padding is not None or not item.shape:
                continue
            if all(size % parts for size in flat(DIMS[node][0])):
                dim = max(range(len(item.shape)), key=item.shape.__getitem__)
                size = item.shape[dim]
                after = (size // parts + 1) * parts
                if size % parts or after <= _LIMIT * size:
                    found[item.name] = dim, after
        return UnevenParameters(found)

    def apply(self, program: Program, decision: UnevenParameters) -> Program:
        if not decision.sizes:
            return program
        program = program.copy()
        gradients = {output.name: number for number, output in enumerate(program.signature.outputs) if output.kind == "gradient"}
        for item, node in program.named_inputs():
            if item.name in decision.sizes:
                dim, size = decision.sizes[item.name]
                _pad_input(program, node, dim, size)
                if item.name in gradients:
                    _pad_result(program, gradients[item.name], dim, size - item.shape[dim])
        return _with_paddings(FindAtoms().apply(program), decision)

    def written(self, program: Program, decision: UnevenParameters) -> dict[str, tuple[int, int]]:
        return dict(decision.sizes)

    def read(self, program: Program, value: Mapping[str, tuple[int, int]]) -> UnevenParameters:
        return UnevenParameters({name: (dim, size) for name, (dim, size) in value.items()})


def _as_it_lies(placed: KnownPadding | None) -> tuple[int, int] | None:
    """The dim that is padded, and its size then, of a parameter that lies with one dim padded at its end; None for any other."""
    padding = placed.padding if placed is not None else None
    if padding is None:
        return None
    pairs = enumerate(zip(padding.before, padding.after, strict=True))
    grown = [(dim, before, after) for dim, (before, after) in pairs if before != after]
    if len(grown) != 1 or not len(grown[0][1]) == len(grown[0][2]) == 1:
        return None  # an atom within a dim: its padding stands between elements
    return grown[0][0], grown[0][2][0]


def _grown(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Another fake tensor, of `size` in `dim`."""
    return value.new_empty([*value.shape[:dim], size, *value.shape[dim + 1 :]])


def _pad_input(program: Program, node: Node, dim: int, size: int) -> None:
    """Let `node`, its casts and copies have the padding, and what else reads them its elements, cut out once in each phase."""
    logical = node.meta["val"].shape[dim]

    def cut(emit: Emitter, value: Node, phase: Phase) -> Node:
        elements = emit.call(aten.slice.Tensor, value, dim, 0, logical)
        if dim:  # readers expect the strides of the parameter
            PHASE[elements] = phase
            elements = emit.call(aten.clone.default, elements, memory_format=torch.contiguous_format)
        return elements

    for value in with_copies(node):
        value.meta["val"] = _grown(value.meta["val"], dim, size)
    read_through(program, node, cut)


def _pad_result(program: Program, number: int, dim: int, more: int) -> None:
    """Append zeros to a gradient, in front of its last casts: it is summed over ranks in the dtype that it had."""
    results = list(program.results)
    node, last = results[number], program.graph.output_node()
    pads = [0] * (2 * (node.meta["val"].ndim - 1 - dim)) + [0, more]
    while node.target in CASTS and len(node.users) == 1 and isinstance(node.args[0], Node):
        last, node = node, node.args[0]
        last.meta["val"] = _grown(last.meta["val"], dim, last.meta["val"].shape[dim] + more)
    grown = Emitter(program.graph, last, node).call(aten.constant_pad_nd.default, node, pads)
    PHASE[grown] = PHASE.get(node) or "backward"
    if last is program.graph.output_node():
        results[number] = grown
        last.args = (tuple(results),)
    else:
        last.replace_input_with(node, grown)


def _with_paddings(program: Program, decision: UnevenParameters) -> Program:
    paddings = dict(_paddings(program, decision))
    signature = program.signature
    inputs = [replace(item, padding=paddings[item.name]) if _is_padded(item, "parameter", paddings) else item for item in signature.inputs]
    outputs = [replace(item, padding=paddings[item.name]) if _is_padded(item, "gradient", paddings) else item for item in signature.outputs]
    return replace(program, signature=replace(signature, inputs=tuple(inputs), outputs=tuple(outputs)))


def _is_padded(item: Input | Output, kind: str, paddings: Mapping[str, Padding]) -> bool:
    return item.kind == kind and item.name in paddings


def _paddings(program: Program, decision: UnevenParameters) -> Iterator[tuple[str, Padding]]:
    for item, node in program.named_inputs():
        if item.kind == "parameter" and item.name in decision.sizes:
            dim, after = decision.sizes[item.name][0], DIMS[node][0]
            assert len(after[dim]) == 1, f"{item.name}: the padded dim {dim} has the atoms {after[dim]}"
            yield item.name, Padding((*after[:dim], (item.shape[dim],), *after[dim + 1 :]), after)
