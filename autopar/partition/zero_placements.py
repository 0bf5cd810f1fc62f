"""What ZeRO leaves of the ways in which parameters, and copies of them, may lie."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch.fx import Node

from autopar.errors import PlanError
from autopar.graph.microbatches import known_ahead
from autopar.ir.freedom import Freedom
from autopar.ir.keys import DIMS
from autopar.ir.markers import held
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Program
from autopar.ir.sharding import Dims, Sharding, Strategy, flat


def is_in_parts(item: Input, freedom: Freedom) -> bool:
    """Whether ZeRO wants an input in parts. Below level 3 that is what has optimizer state: no frozen parameter."""
    return item.kind == "parameter" and freedom.zero is not None and (item.requires_grad or freedom.zero.level == 3)


def in_parts(strategies: Iterable[Strategy], dims: Dims, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Strategy, ...]:
    """Each of `strategies`, ways in which a parameter lies that leave `axes` alone, with these at the minor end of the first atom that
    they divide: gathered over `axes` it is contiguous as it comes, and lies as it did. Without those that have no such atom; empty where
    none has."""
    found: dict[Sharding, Strategy] = {}
    for each in strategies:
        (lies,) = each.results
        for position, (size, split) in enumerate(zip(flat(dims), lies.splits, strict=True)):
            if size % mesh.size_of((*split, *axes)) == 0:
                cut = Sharding((*lies.splits[:position], (*split, *axes), *lies.splits[position + 1 :]))
                found[cut] = Strategy((), (cut,), (*each.factors, *((axis, f"a{position}") for axis in axes)), mesh.size_of(cut.axes))
                break
    return tuple(found.values())


def of_copies(strategies: Iterable[Strategy], program: Program) -> tuple[Strategy, ...]:
    """Of the strategies of a `held` node those in which the copy lies over just those axes of `dp` over which copies do; those over none
    where no atom divides by them, and all where each sample has rows of its own in the parameter, which lie with the sample."""
    masters, copies = program.freedom.master_axes(program.mesh), set(program.freedom.copy_axes(program.mesh))
    strategies = tuple(strategies)
    found = tuple(each for each in strategies if not each.results[0].unreduced and copies == set(masters) & set(each.results[0].axes))
    return found or tuple(each for each in strategies if not set(masters) & set(each.results[0].axes)) or strategies


def has_copy(node: Node) -> bool:
    """Whether a parameter itself, no cast of it, is read by a copy."""
    return node.op == "placeholder" and any(user.target is held for user in node.users)


def kept_whole(program: Program) -> frozenset[Node]:
    """What ZeRO does not mean, though it has no batch: what is made of the call's inputs alone (positions, masks), and of whole copies of
    parameters. It is not cut over `dp`, to be gathered again where links cost nothing."""
    freedom = program.freedom
    if freedom.zero is None:
        return frozenset()
    found = set(known_ahead(program))
    if not freedom.copy_axes(program.mesh):
        found.update(node for node in program.graph.nodes if node.target is held)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(node for node in found if node.target is not held)


def require_in_parts(program: Program, shardings: Mapping[str, Sharding], reasons: Mapping[str, str], placed: Container[str]) -> None:
    """Raise `PlanError` with every parameter that is fixed otherwise than `zero=` wants it; `reasons` says by whom, and `placed` which
    of them an earlier call did by itself, as it does with what it does not train."""
    zero, masters = program.freedom.zero, set(program.freedom.master_axes(program.mesh))
    problems: dict[str, str] = {}
    for item, node in program.named_inputs():
        if item.name not in shardings or not masters or not is_in_parts(item, program.freedom):
            continue
        dims, lies = DIMS[node][0], shardings[item.name]
        is_possible = any(size % program.mesh.size_of(tuple(masters)) == 0 for size in flat(dims))
        if is_possible and not masters <= set(lies.axes):
            found = f"{item.name!r} {lies.describe(dims)}, {reasons[item.name]}, is not split over {', '.join(sorted(masters))}"
            problems[item.name] = found
    if zero is not None and problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        remedy = "split them over dp as well (the last axis of a dim), drop the pins, or leave zero= out"
        if all(name in placed for name in problems):
            remedy = "what the first call does not train lies whole, and stays so: let the first call (or example_inputs) use and train it"
            remedy += ", and freeze it then; zero=3 has what is frozen in parts from the start" if zero.level < 3 else ""
        raise PlanError(f"{zero} wants parameters in parts over dp, and is asked for against what is fixed:\n{lines}\n{remedy}")
