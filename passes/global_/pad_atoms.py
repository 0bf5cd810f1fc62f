"""Sizes of the model that an axis does not divide are padded: vocabularies, heads, widths."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch.fx import Node

from autopar.ir.keys import DIMS
from autopar.ir.mesh import parent
from autopar.ir.padding import Padding
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, flat
from autopar.ops.atom_classes import Atom, AtomClasses
from autopar.ops.lookup import registered_rule
from autopar.ops.padded_ops import with_atoms
from autopar.partition.pad_graph import covered, padded_program
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.plans.json import Json, to_dims

logger = logging.getLogger("autopar")


class KnownPadding(Protocol):
    """What is known of a parameter: how an earlier capture, or a plan, padded it."""

    @property
    def padding(self) -> Padding | None: ...


@dataclass(frozen=True)
class PaddingDecision:
    """The padded parameters by name. All that walks with a padded atom is padded alike."""

    paddings: Mapping[str, Padding] = field(default_factory=dict[str, Padding])

    def __str__(self) -> str:
        return "\n".join(f"{name}: {each.before} → {each.after}" for name, each in self.paddings.items()) or "nothing is padded"


@dataclass(frozen=True)
class PadAtoms:
    """Pad an atom of a parameter that has no factor in common with the ranks beside dp, so that it can be split all the same.

    An atom is padded if it carries at least the share `least` of the FLOPs of all contractions and padding makes it at most `limit`
    times as large; if every op can take the padding; and if the size is the model's: the batch and its lengths are the user's to
    choose. What shares a factor with the axis is left to sub-axes.

    The padding of parameters is zero. Before an op reduces an atom, the padding of operands in which it is not known to be zero
    is masked; results for the user are cut back. Ranks' work is even; what padding and masks add to it is priced as any work.

    `placed` holds what is decided already, by parameter name. With `is_real` parameters become DTensors, whose uneven parts are
    those of `torch.chunk`: then only atoms that are a whole dim are padded (vocabularies and widths, not heads), and only where the
    axis stays in one piece.

    Reads: DIMS. Writes: DIMS, BATCH, a GLOBAL graph of padded values, `padding` in the signature. Ensures: inputs from the user and results
    for the user have their logical shapes; no element of the padding reaches one.
    """

    placed: Mapping[str, KnownPadding] = field(default_factory=dict[str, KnownPadding])
    is_real: bool = False
    limit: float = 4 / 3
    least: float = 0.01
    name: str = "pad atoms"

    def decide(self, program: Program) -> PaddingDecision:
        num_ranks = program.mesh.size_of([axis for axis in program.mesh.names if _splits(axis, program)])
        sizes = {size: -(-size // num_ranks) * num_ranks for size in _sizes(program) if math.gcd(size, num_ranks) == 1 < num_ranks}
        sizes = {size: after for size, after in sizes.items() if after <= self.limit * size}
        if not sizes and not any(each.padding for each in self.placed.values()):
            return PaddingDecision()
        classes = _classes(program)
        padded = {root: sizes[size] for root, size in _worth_it(program, classes, set(sizes), self.least).items()}
        if self.is_real:
            padded = {root: after for root, after in padded.items() if _is_torch_chunk(root, classes, program)}
        padded = _as_placed(padded, self.placed, program, classes, num_ranks)
        return PaddingDecision(dict(_paddings(program, classes, padded)))

    def apply(self, program: Program, decision: PaddingDecision) -> Program:
        if not decision.paddings:
            return program
        result = FindAtoms().apply(padded_program(program, decision.paddings, _classes(program)))
        result = replace(result, logical_share=share_of_padded(result, program))
        for item, node in result.named_inputs():
            if item.padding is not None and DIMS[node][0] != item.padding.after:
                logger.warning("nothing is padded: with padding %s has the atoms %s, not %s", item.name, DIMS[node][0], item.padding.after)
                return program
        return result

    def written(self, program: Program, decision: PaddingDecision) -> dict[str, Json]:
        return {name: (each.before, each.after) for name, each in decision.paddings.items()}

    def read(self, program: Program, value: Mapping[str, Sequence[list[list[int]]]]) -> PaddingDecision:
        return PaddingDecision({name: Padding(to_dims(before), to_dims(after)) for name, (before, after) in value.items()})


def _is_torch_chunk(root: Atom, classes: AtomClasses, program: Program) -> bool:
    """Whether the parts of all parameters padded in this class are those that `torch.chunk` cuts."""
    dims = [_dim_of(DIMS[atom[0]][0], atom[2]) for _, atom in _of_parameters(program) if classes.find(atom) == root]
    return all(len(dim) == 1 for dim in dims) and RefineMesh().decide(program) == program.mesh


def _splits(axis: str, program: Program) -> bool:
    """Whether `axis` splits what the model brings."""
    return parent(axis) != "pp" and not program.freedom.is_batch(axis)


def _sizes(program: Program) -> set[int]:
    return {size for item, node in program.named_inputs() if item.kind == "parameter" for size in flat(DIMS[node][0])}


def _of_parameters(program: Program) -> Iterator[tuple[str, Atom]]:
    for item, node in program.named_inputs():
        if item.kind == "parameter":
            for position in range(len(flat(DIMS[node][0]))):
                yield item.name, (node, 0, position)


def _dim_of(dims: Dims, position: int) -> tuple[int, ...]:
    """The dim that has the atom at `position`."""
    return next(dim for i, dim in enumerate(dims) for _ in dim if position < sum(map(len, dims[: i + 1])))


def _classes(program: Program) -> AtomClasses:
    """What walks together; a gradient walks with its parameter."""
    classes = AtomClasses.of(program.graph)
    inputs = {item.name: node for item, node in program.named_inputs() if item.kind == "parameter"}
    for output, node in program.named_outputs():
        if output.kind == "gradient":
            for position in range(len(flat(DIMS[node][0]))):
                classes.join((node, 0, position), (inputs[output.name], 0, position))
    return classes


def _worth_it(program: Program, classes: AtomClasses, sizes: set[int], least: float) -> dict[Atom, int]:
    """Classes of parameters' atoms of these sizes that split that much work, that every op can take padded, and that no batch input has."""
    found = {classes.find(atom): flat(DIMS[atom[0]][0])[atom[2]] for _, atom in _of_parameters(program)}
    found = {root: size for root, size in found.items() if size in sizes}
    for item, node in program.named_inputs():
        if item.kind == "batch":
            for position in range(len(flat(DIMS[node][0]))):
                found.pop(classes.find((node, 0, position)), None)
    work, total = dict[Atom, float](), 0.0
    for node in program.graph.nodes:
        if node.op == "call_function":
            free, others = covered(node, classes)
            total += (flops := _flops(node))
            for root in free if flops else ():
                work[root] = work.get(root, 0.0) + flops
            for root in others:
                found.pop(root, None)
    return {root: size for root, size in found.items() if work.get(root, 0.0) > least * total}


def share_of_padded(padded: Program, program: Program) -> float:
    """The `logical_share` of `program` once it is padded; a model without contractions has no work of that kind to pad."""
    return program.logical_share * (_work_of(program) / work if (work := _work_of(padded)) else 1.0)


def _work_of(program: Program) -> float:
    """FLOPs of all contractions."""
    return sum(_flops(node) for node in program.graph.nodes if node.op == "call_function")


def _flops(node: Node) -> float:
    rule = registered_rule(node)  # of a contraction; what has none has no FLOPs that count
    return rule.flops if rule is not None else 0.0


def _as_placed(
    padded: dict[Atom, int], placed: Mapping[str, KnownPadding], program: Program, classes: AtomClasses, num_ranks: int
) -> dict[Atom, int]:
    """`padded`, but a class with a parameter that is `placed` as it is there, if that divides here.

    A class of which one parameter has no padding was not padded here: that of others is `PadParameters`', each parameter's own.
    """
    found, whole = dict(padded), set[Atom]()
    for name, (node, _, position) in _of_parameters(program):
        if name not in placed:
            continue
        root, padding = classes.find((node, 0, position)), placed[name].padding
        if padding is None or (padding.before == DIMS[node][0] and flat(padding.before)[position] == flat(padding.after)[position]):
            whole.add(root)
        elif num_ranks > 1 and padding.before == DIMS[node][0] and flat(padding.after)[position] % num_ranks == 0:
            found[root] = flat(padding.after)[position]
    return {root: after for root, after in found.items() if root not in whole}


def _paddings(program: Program, classes: AtomClasses, padded: Mapping[Atom, int]) -> Iterator[tuple[str, Padding]]:
    sizes: dict[str, dict[int, int]] = {}
    for name, atom in _of_parameters(program):
        if classes.find(atom) in padded:
            sizes.setdefault(name, {})[atom[2]] = padded[classes.find(atom)]
    for item, node in program.named_inputs():
        if item.kind == "parameter" and item.name in sizes:
            yield item.name, Padding(DIMS[node][0], with_atoms(DIMS[node][0], sizes[item.name]))
