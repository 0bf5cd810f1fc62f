"""A pattern that was matched in a graph, the search for matches, and the op that replaces one: the same for all fusing passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, lay_out_anew, tensor_of
from autopar.graph.emit import replace as replace_node
from autopar.ir.fusion import FusionSite, NotFusible
from autopar.ir.program import Program

Reading = TypeVar("Reading")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Match(ABC):
    """One op of ours can give the value `root`. What it reads is in further fields; `interior` are the nodes between."""

    root: Node
    interior: frozenset[Node]

    @abstractmethod
    def conditions(self) -> tuple[str, ...]:
        """What was found, a phrase each."""

    @abstractmethod
    def emit(self, emit: Emitter) -> Node:
        """The op on its operands, in front of `root`, in the dtype that suits it."""

    def write(self, rewriting: Rewriting) -> None:
        """Put the op in the place of `root`, and erase what only led to it."""
        emit = Emitter(self.root.graph, before=self.root)
        out = emit.cast(self.emit(emit), tensor_of(self.root).dtype)
        rewriting.replace(self.root, out)
        self.erase_interior()
        lay_out_anew(out)

    def erase_interior(self) -> None:
        """Erase the nodes between that nobody reads."""
        for node in sorted(self.interior, reverse=True):
            if not node.users:
                node.graph.erase_node(node)


class Rewriting:
    """The nodes of a copy of a program by the names that they had when forms were matched; what was replaced by what stands for it."""

    def __init__(self, program: Program) -> None:
        self.program = program.copy()
        self._nodes = {node.name: node for node in self.program.graph.nodes}
        self._names = {node: name for name, node in self._nodes.items()}

    def replace(self, node: Node, by: Node) -> None:
        """Let `by` stand for `node`, here and in the matches to come."""
        name = self._names.pop(node)
        replace_node(node, by)
        self._nodes[name], self._names[by] = by, name

    def here(self, value: Any) -> Any:
        """`value`, a match or a part of one, of the nodes of the copy."""
        if isinstance(value, Node):
            return self._nodes[value.name]
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: self.here(getattr(value, field.name)) for field in fields(value)})
        if isinstance(value, (tuple, list, set, frozenset)):
            return type(value)(map(self.here, value))
        return value


def first_match(readings: Iterable[Reading], match: Callable[[Reading], Found | None]) -> Found | None:
    """What `match` makes of the first of `readings` that is a form. Raises `NotFusible`, the first, where none is."""
    reason: NotFusible | None = None
    for reading in readings:
        try:
            found = match(reading)
        except NotFusible as refused:
            reason = reason or refused
            continue
        if found is not None:
            return found
    if reason is not None:
        raise reason
    return None


def site_at(node: Node, what: str, match: Callable[[Node], Match | None], at_root: bool = False) -> FusionSite | None:
    """What `match` says of `node`: a form (`at_root`: that is named after its root), why it is nearly one, or nothing."""
    try:
        found = match(node)
    except NotFusible as reason:
        return FusionSite.at(node, what, reason=str(reason))
    return None if found is None else FusionSite.at(found.root if at_root else node, what, found.conditions(), match=found)


def look_at(
    nodes: Iterable[Node], what: str, match: Callable[[Node], Match | None], found: dict[Node, FusionSite], taken: set[Node]
) -> None:
    """Add to `found` what there is to say of `nodes`, one after another: a form takes all that it can, `taken` nodes belong to no other."""
    for node in nodes:
        site = None if node in taken else site_at(node, what, match)
        made_of = set[Node]() if site is None or site.match is None else site.match.interior | {site.match.root}
        if site is not None and taken.isdisjoint(made_of):
            # A form tells more than why there is none of another kind.
            found[node] = site if site.fused else found.get(node, site)
            taken |= made_of


def rewritten(program: Program, sites: Iterable[FusionSite]) -> Program:
    """A copy of `program` with ops of ours in the place of the forms found at `sites`, written in this order; itself where none was."""
    sites = tuple(sites)
    if not sites:
        return program
    rewriting = Rewriting(program)
    for site in sites:
        rewriting.here(site.match).write(rewriting)
    remove_dead_code(rewriting.program.graph)
    return rewriting.program
