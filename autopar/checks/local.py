"""Invariants of a LOCAL program: one rank's part of every value, and collectives launched and waited for.

    a value that stands for a part of a GLOBAL one has the local shape of that value's sharding
    a launch runs over axes of the mesh, on a value laid out for them; one wait completes it and nothing else touches it
    what a GLOBAL op became reads the parts of what that op reads, and launches nothing
    what a reshard became reduces what is unreduced, by its kind, once, and leaves unreduced what the reshard leaves
    a value that was made in pieces is put together of all of them, in order, and all its pieces go over the same axes

The last two compare with the GLOBAL program; nodes of a LOCAL one name their origin in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from autopar.checks.sharding import describe_sharding
from autopar.checks.violation import Violation, at
from autopar.ir.arguments import list_at, node_at
from autopar.ir.collectives import all_gather, all_reduce, is_launch, reduce_scatter, reshard, wait
from autopar.ir.keys import CHUNK, DIMS, ORIGIN, SHARDING
from autopar.ir.mesh import MICROBATCHES, Mesh
from autopar.ir.printing import op_name
from autopar.ir.program import Program, operands, results_of
from autopar.ir.reshard import steps

aten = torch.ops.aten


def check_local(program: Program, origin: Program | None = None) -> list[Violation]:
    """Every violation of the invariants above; `origin` is the GLOBAL program that was lowered, where it is known."""
    found: list[Violation] = []
    for node in program.graph.nodes:
        if node in SHARDING and node in DIMS:
            found += _shapes(node, program.mesh)
        if is_launch(node):
            found += _launch(node, program.mesh)
        elif node.op == "call_function" and node.target is wait:
            found += _wait(node)
    # What a launch does makes sense only on axes that exist and with a wait.
    if origin is not None and not found:
        found += _Comparison(program, origin).run()
    return found


def _shapes(node: Node, mesh: Mesh) -> Iterator[Violation]:
    for dims, sharding, value in zip(DIMS[node], SHARDING[node], results_of(node), strict=False):
        problems = sharding.problems(dims, mesh)
        for problem in problems:
            yield Violation(f"illegal sharding: {problem}", at(node), fix="split another atom, or over fewer ranks")
        expected = () if problems else sharding.local_shape(dims, mesh)
        if not problems and value is not None and tuple(value.shape) != expected:
            what = f"the local shape is not this rank's part of {describe_sharding(sharding, dims)}"
            yield Violation(what, at(node), str(list(expected)), str(list(value.shape)), "localise the shapes among its arguments")


def _launch(node: Node, mesh: Mesh) -> Iterator[Violation]:
    source, axes = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(axes, tuple)
    name, value = op_name(node.target), source.meta["val"]
    unknown = [str(axis) for axis in axes if axis not in mesh.names]
    if unknown:
        yield Violation(f"{name} over the unknown axis {unknown[0]!r}", at(node), f"axes of the mesh ({mesh})", str(axes))
        return
    size = mesh.size_of([str(axis) for axis in axes])
    if node.target is all_gather and node.args[2] != size:
        yield Violation(
            f"{name} over {', '.join(map(str, axes))} gathers from the wrong number of ranks", at(node), str(size), str(node.args[2])
        )
    if node.target not in (all_gather, all_reduce) and (value.ndim == 0 or value.shape[0] != size):
        fix = "lay the parts out along dim 0"
        yield Violation(f"{name} wants one entry per rank first", at(node), f"[{size}, …]", str(list(value.shape)), fix)
    yield from _completed(node)


def _completed(node: Node) -> Iterator[Violation]:
    waits = [user for user in node.users if user.target is wait]
    if len(waits) != 1:
        names = ", ".join(str(user) for user in waits) or "none"
        yield Violation(
            "a launch needs exactly one wait", at(node), "1", f"{len(waits)} ({names})", "wait once, and use what the wait returns"
        )
    for user in node.users:
        if user.target is not wait:
            yield Violation(
                "the result of a launch is used before its wait", at(user), "what wait returns", f"%{node.name}", "use the wait's result"
            )


def _wait(node: Node) -> Iterator[Violation]:
    launched = node.args[0]
    if not isinstance(launched, Node) or not is_launch(launched):
        yield Violation(
            "wait for what was never launched",
            at(node),
            "the result of a launch",
            str(launched),
            "wait for a launch, or use the value itself",
        )


class _Comparison:
    """A LOCAL program against the GLOBAL one it came from, origin by origin."""

    def __init__(self, program: Program, origin: Program) -> None:
        self.program = program
        self.globals = {node.name: node for node in origin.graph.nodes}
        # Stages of a pipeline may each have a copy.
        self.locals: dict[str, list[Node]] = {}
        for node in program.graph.nodes:
            if node in ORIGIN:
                self.locals.setdefault(ORIGIN[node], []).append(node)
        self._known_parts: dict[Node, set[Node]] = {}

    def run(self) -> Iterator[Violation]:
        for name, node in self.globals.items():
            if node.target is reshard and node.users and name not in self.locals:
                yield self._dropped(node)
        for name, copies in self.locals.items():
            node = self.globals.get(name)
            if node is None:
                what = f"the node's origin {name!r} is not in the GLOBAL program"
                yield Violation(what, at(copies[0]), fix="name the GLOBAL node it is a part of")
            elif node.op == "call_function":
                for local in copies:
                    yield from self._origin(node, local)

    def _dropped(self, node: Node) -> Violation:
        source = operands(node)[0]
        needed = " + ".join(map(str, steps(DIMS[node][0], SHARDING[source][0], SHARDING[node][0], self.program.mesh)))
        return Violation(
            "a reshard has no part in the LOCAL program: its collective was dropped", at(node), needed, "nothing", "lower every reshard"
        )

    def _origin(self, node: Node, local: Node) -> Iterator[Violation]:
        members, read = _members(local)
        if read and all(ORIGIN[part] == node.name and part in CHUNK for part in read):
            yield from _joined(members, local)
            return
        allowed = {part for operand in operands(node) for part in self._parts(operand)}
        for part in read:
            if part not in allowed and part is not local:
                expected = ", ".join(f"the part of %{ORIGIN[each]}" for each in allowed) or "nothing"
                what = f"what %{node.name} became reads a value that %{node.name} does not read"
                yield Violation(what, at(local), expected, self._tell(part), "read the parts of the origin's operands")
        launches = [member for member in members if is_launch(member)]
        if local not in CHUNK and any(launch in CHUNK for launch in launches):
            yield from _joined(members, local)
            launches = _without_pieces(launches)
        if node.target is reshard:
            yield from self._reductions(node, local, launches)
        elif launches:
            fix = "only reshards move data between ranks"
            yield Violation(f"{op_name(launches[0].target)} where the origin %{node.name} changes no sharding", at(launches[0]), fix=fix)

    def _parts(self, node: Node) -> set[Node]:
        """The LOCAL nodes that hold `node`; a call that does nothing locally is what it reads."""
        if node not in self._known_parts:
            copies = self.locals.get(node.name)
            above = (part for operand in operands(node) for part in self._parts(operand))
            self._known_parts[node] = set(above if copies is None else copies)
        return self._known_parts[node]

    def _tell(self, local: Node) -> str:
        text = f"the part of %{ORIGIN[local]}"
        return f"{text}, {describe_sharding(SHARDING[local][0], DIMS[local][0])}" if local in SHARDING else text

    def _reductions(self, node: Node, local: Node, launches: list[Node]) -> Iterator[Violation]:
        """Whether the launches reduce what the reshard reduces. A doubled reduction multiplies by the number of ranks."""
        unreduced: dict[str, str] = {axis: kind for axis, kind in SHARDING[operands(node)[0]][0].unreduced}
        for launch in launches:
            yield from _reduction(launch, unreduced)
        left, expected = set(unreduced), dict(SHARDING[node][0].unreduced)
        if not launches and MICROBATCHES in left - set(expected):
            left.remove(MICROBATCHES)  # each microbatch has taken its own estimate
        if left != set(expected):
            axes = ", ".join(sorted(left - set(expected)))
            what = f"a reduction was dropped: the value is still unreduced over {axes}" if axes else "a reduction too many"
            got = ", ".join(op_name(launch.target) for launch in launches) or "no collective"
            steps_text = f"a reduction from {_listed(SHARDING[operands(node)[0]][0].unreduced)} to {_listed(SHARDING[node][0].unreduced)}"
            yield Violation(what, at(local), steps_text, got, "launch an all_reduce or reduce_scatter over these axes")


def _listed(unreduced: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in unreduced) or "nothing unreduced"


def _members(local: Node) -> tuple[list[Node], set[Node]]:
    """The nodes that make `local` out of parts of other GLOBAL values, in order, and those parts."""
    members, read, stack = {local}, set[Node](), [local]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand in ORIGIN:
                read.add(operand)
            elif operand.op != "placeholder" and operand not in members:
                members.add(operand)
                stack.append(operand)
    return sorted(members), read


def _joined(members: list[Node], local: Node) -> Iterator[Violation]:
    """Whether the pieces that `local` is put together of are all of them, in order."""
    for each in members:
        if each.target is aten.cat.default:
            pieces = [_piece(part) for part in list_at(each, 0) if isinstance(part, Node)]
            numbers = [CHUNK.get(piece) for piece in pieces]
            if numbers != list(range(len(numbers))):
                fix = "join every piece once, the first before the second"
                yield Violation("a value is put together of wrong pieces", at(local), str(list(range(len(numbers)))), str(numbers), fix)


def _piece(part: Node) -> Node:
    """The piece that `part` is, or is a view of."""
    return node_at(part, 0) if part not in CHUNK and part.target is aten.reshape.default else part


def _without_pieces(launches: list[Node]) -> list[Node]:
    """Those that move one value, once."""
    alone = [launch for launch in launches if launch not in CHUNK]
    first = {(launch.target, launch.args[1:]): launch for launch in reversed(launches) if launch in CHUNK}
    return [*alone, *first.values()]


def _kind_of(launch: Node) -> object:
    """How a launch reduces; None where it does not. What is gathered and then goes through a logsumexp alone is reduced by that."""
    if launch.target in (all_reduce, reduce_scatter):
        return launch.args[2]
    readers = [reader for end in launch.users for reader in end.users]
    is_sum = (
        launch.target is all_gather
        and bool(readers)
        and all(reader.target is aten.logsumexp.default and reader.args[1:] == ([0],) for reader in readers)
    )
    return "logsumexp" if is_sum else None


def _reduction(launch: Node, unreduced: dict[str, str]) -> Iterator[Violation]:
    """Take off `unreduced` what `launch` reduces; say what it reduces, or moves, wrongly."""
    name, axes = op_name(launch.target), [str(axis) for axis in list_at(launch, 1)]
    kind = _kind_of(launch)
    reduces = kind is not None
    for axis in axes:
        if not reduces and axis in unreduced:
            what, fix = f"{name} over {axis}, over which its operand is unreduced", "reduce first: partial sums are no parts of the value"
            yield Violation(what, at(launch), "a collective that reduces", name, fix)
        elif reduces and axis not in unreduced:
            what = f"{name} over {axis}, over which its operand is not unreduced: a doubled reduction, or the wrong axis"
            got = _listed(tuple(unreduced.items()))
            yield Violation(
                what, at(launch), f"an operand unreduced over {axis}", got, "drop it, or reduce over the axes that are unreduced"
            )
        elif reduces and kind != unreduced.pop(axis):
            yield Violation(
                f"{name} over {axis} reduces by the wrong kind",
                at(launch),
                got=str(kind),
                fix="reduce by the kind in the sharding",
            )
