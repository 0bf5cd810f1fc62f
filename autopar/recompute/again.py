"""Forward calls are computed again in the backward, just before the first call there that reads what they make.

    forward    x ─ norm ─ mm ─ gelu ─ mm            forward    x ─ norm ─ mm ─ gelu ─ mm
               │    │      │     │                             │
            save  save   save  save                         save
               │    │      │     │             →               │
    backward  ...  reads all four                  backward  norm' ─ mm' ─ gelu' ─ ... reads x and these

A copy reads other copies, what is saved, and inputs. It has the sharding of what it is a copy of, so what follows (lowering,
collectives, fragments) treats it as any call of the backward. Draws are functions of positions: they come to the same again.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import copy_origin
from autopar.ir.collectives import reshard
from autopar.ir.keys import BATCH, DIMS, PHASE, RECOMPUTED, SHARDING, SOURCE, STAGE, STRATEGY, Source
from autopar.ir.markers import save
from autopar.ir.program import Program
from autopar.ir.reshard import reachable
from autopar.ir.sharding import Sharding
from autopar.ops.strategies import strategies_of
from autopar.ops.traits import MADE_ANEW

aten = torch.ops.aten


def computed_again(program: Program, chosen: Iterable[str]) -> Program:
    """`program` with the forward calls named in `chosen` computed again where the backward wants what they make; all else that it wants
    is saved.

    Views and gathers of what is there are made anew besides. A value that another stage of a pipeline reads is received and kept there.
    Reads: PHASE, STAGE, SHARDING, STRATEGY of a GLOBAL program with its reshards. Writes: copies, with RECOMPUTED, and `save` nodes.
    """
    program = program.copy()
    rewriting = _Rewriting(program, frozenset(chosen))
    for node in list(program.graph.nodes):
        if node.op == "call_function" and PHASE.get(node) == "backward":
            rewriting.redirect(node)
    remove_dead_code(program.graph)
    return program


def is_forward(node: Node) -> bool:
    return node.op == "call_function" and PHASE.get(node) == "forward"


def unmoved(node: Node) -> Node:
    """The value that `node` is, in the sharding in which it was made."""
    while node.target is reshard:
        node = _operand(node)
    return node


def reduces(node: Node) -> bool:
    """Whether a change of sharding completes a partial sum."""
    return node.target is reshard and set(SHARDING[_operand(node)][0].unreduced) != set(SHARDING[node][0].unreduced)


def saved_value(node: Node) -> Node:
    """What a `save` node saves, in the sharding in which it was made."""
    return unmoved(_operand(node))


def _can_be_saved(value: Node) -> bool:
    """Partial sums can; of partial maxima, and of logarithms of sums, only what ranks have together."""
    return all(kind == "sum" for _, kind in SHARDING[value][0].unreduced)


def _operand(node: Node) -> Node:
    operand = node.args[0]
    assert isinstance(operand, Node), f"{node} has no operand"
    return operand


@dataclass
class _Rewriting:
    program: Program
    chosen: frozenset[str]
    copies: dict[Node, Node] = field(default_factory=dict[Node, Node])
    # By value and the stage that keeps it.
    saves: dict[tuple[Node, int | None], list[Node]] = field(default_factory=lambda: defaultdict(list))
    # What the backward brings into another sharding anyway: by what it is made of, its sharding and its stage.
    moved: dict[tuple[Node, Sharding, int | None], Node] = field(default_factory=dict[tuple[Node, Sharding, int | None], Node])
    passed: set[Node] = field(default_factory=set[Node])

    def __post_init__(self) -> None:
        self.places = {node: place for place, node in enumerate(self.program.graph.nodes)}
        for node in self.program.graph.nodes:
            if node.target is save:
                self.saves[saved_value(node), STAGE.get(node)].append(node)
            elif node.target is reshard and PHASE.get(node) == "backward" and self._is_there(_operand(node)):
                self.moved.setdefault((_operand(node), SHARDING[node][0], STAGE.get(node)), node)

    def _is_there(self, node: Node) -> bool:
        return node.op == "placeholder" or (node.target is save and not self._is_dropped(node, STAGE.get(node)))

    # ---- what a call of the backward reads

    def redirect(self, node: Node) -> None:
        """Let a call of the backward read copies of what is not kept for it."""
        self.passed.add(node)
        for operand in dict.fromkeys(node.all_input_nodes):
            if operand.target is not save or not is_forward(operand) or not self._is_dropped(operand, STAGE.get(node)):
                continue
            if node.target is reshard:
                # Not by way of the sharding in which it would have been kept.
                node.replace_all_uses_with(self._in_sharding(saved_value(operand), SHARDING[node][0], node))
            else:
                node.replace_input_with(operand, self._in_sharding(saved_value(operand), SHARDING[operand][0], node))

    def _is_dropped(self, kept: Node, stage: int | None) -> bool:
        return self._is_again(_operand(kept), stage) and saved_value(kept).target not in MADE_ANEW

    def _in_sharding(self, value: Node, sharding: Sharding, user: Node) -> Node:
        """A copy of `value` in front of `user`, in `sharding`."""
        forms = [value, *_moved_forms(value)]
        form = next((each for each in forms if SHARDING[each][0] == sharding and self._is_again(each, STAGE.get(value))), value)
        copy = self._copied(form, user)
        return copy if SHARDING[copy][0] == sharding else self._moved(copy, sharding, user)

    # ---- copies

    def _is_again(self, node: Node, stage: int | None) -> bool:
        """Whether a call of the forward is copied for calls of `stage`."""
        if not is_forward(node) or STAGE.get(node) not in (None, stage):
            return False
        if node.target is operator.getitem:
            return self._is_again(_operand(node), stage)
        if node.target in MADE_ANEW:
            source = _operand(node)
            return source.op == "placeholder" or STAGE.get(source) in (None, stage)
        if node.target is reshard and not reduces(node):
            return self._is_again(_operand(node), stage)
        if node.target is reshard and not _can_be_saved(_operand(node)) and not self._is_again(_operand(node), stage):
            return False
        return node.name in self.chosen

    def _copied(self, node: Node, user: Node) -> Node:
        """The copy of `node`, with the copies that it reads in front of `user`, in the order of the forward."""
        wanted, pending = set[Node](), [node]
        while pending:
            each = pending.pop()
            if each not in wanted and each not in self.copies:
                wanted.add(each)
                pending += [operand for operand in each.all_input_nodes if self._is_again(operand, STAGE.get(each))]
        for each in sorted(wanted, key=self.places.__getitem__):
            self._copy(each, user)
        return self.copies[node]

    def _copy(self, node: Node, user: Node) -> None:
        stage = STAGE.get(node)
        read = {operand: self._read(operand, stage, user) for operand in node.all_input_nodes}
        with self.program.graph.inserting_before(user):
            copy = self.program.graph.node_copy(node, lambda operand: read[operand])
        copy.name = f"{node.name}_again"
        PHASE[copy], RECOMPUTED[copy] = "backward", node.name
        self.copies[node] = copy

    def _read(self, operand: Node, stage: int | None, user: Node) -> Node:
        """What a copy reads in place of `operand`."""
        if operand in self.copies:
            return self.copies[operand]
        value = unmoved(operand)
        if value.op == "placeholder":
            return operand if value is operand else self._moved(value, SHARDING[operand][0], user, stage)
        return self._kept(operand, stage, user)

    # ---- what is kept

    def _kept(self, operand: Node, stage: int | None, user: Node) -> Node:
        """A value of the forward, saved: as it was made where that is no partial sum and the stage's own, else as it is read."""
        value, sharding = unmoved(operand), SHARDING[operand][0]
        known = [*self.saves[value, stage], *self.saves[operand, stage]]
        kept = next((each for each in known if reachable(SHARDING[each][0], sharding) and not self._is_dropped(each, stage)), None)
        if kept is None:
            is_own = STAGE.get(value) in (None, stage)
            chosen = value if is_own and not SHARDING[value][0].unreduced else operand
            kept = self._saved(chosen)
            self.saves[chosen, stage].append(kept)
        return kept if SHARDING[kept][0] == sharding else self._moved(kept, sharding, user, stage)

    def _saved(self, value: Node) -> Node:
        with self.program.graph.inserting_after(value):
            node = self.program.graph.call_function(save, (value,))
        node.meta["val"] = value.meta["val"]
        copy_origin(value, node)
        DIMS[node], BATCH[node], SHARDING[node] = DIMS[value], BATCH[value], SHARDING[value]
        strategies = strategies_of(node, self.program.mesh, self.program.freedom)
        STRATEGY[node] = next(each for each in strategies if each.operands == each.results == SHARDING[value])
        return node

    def _moved(self, value: Node, sharding: Sharding, user: Node, stage: int | None = None) -> Node:
        """`value`, which is there, in another sharding; what the backward brings there later on is brought now."""
        stage = None if value.op == "placeholder" else STAGE.get(value) if stage is None else stage
        key = (value, sharding, stage)
        if key in self.moved:
            node = self.moved[key]
            if node not in self.passed:
                user.prepend(node)
                self.passed.add(node)
            return node
        with self.program.graph.inserting_before(user):
            node = self.program.graph.call_function(reshard, (value, sharding))  # type: ignore[arg-type]
        node.meta["val"] = value.meta["val"]
        # What all stages have is moved by each that reads it.
        SOURCE[node] = SOURCE.get(user if value.op == "placeholder" else value) or Source()
        DIMS[node], BATCH[node], SHARDING[node], PHASE[node] = DIMS[value], BATCH[value], (sharding,), "backward"
        RECOMPUTED[node] = value.name
        if stage is not None:
            STAGE[node] = stage
        self.passed.add(node)
        self.moved[key] = node
        return node


def _moved_forms(value: Node) -> list[Node]:
    """What the forward makes of `value` by changes of sharding."""
    found = [user for user in value.users if user.target is reshard and is_forward(user)]
    return found + [form for each in found for form in _moved_forms(each)]
