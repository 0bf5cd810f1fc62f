"""Values that are known before the program runs: they follow from shapes and literals alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import pytree, schema_of, writes_operands
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.graph.promote import default_float64, promote_tensor, promoted_dtype
from autopar.ir.arguments import call_of, node_at
from autopar.ir.program import Program, operands

aten = torch.ops.aten

# Masks of more elements are not evaluated: they stay operands.
_MOST_ELEMENTS = 1 << 26
# Results of these depend on the shape of their operand, not on its values.
_FILLS = {aten.full_like.default, aten.new_full.default, aten.zeros_like.default, aten.new_zeros.default, aten.ones_like.default,
          aten.new_ones.default, aten.full.default, aten.zeros.default, aten.ones.default}  # fmt: skip
_ONES = {aten.ones_like.default, aten.new_ones.default, aten.ones.default}
_FULL: dict[object, int] = {aten.full_like.default: 1, aten.new_full.default: 2, aten.full.default: 1}
# They read memory that nobody wrote, or draw.
_UNKNOWN = ("empty", "rand", "bernoulli", "dropout", "multinomial", "normal", "custom_function", "item", "_local_scalar")


def gives_the_same(target: object) -> bool:
    """Whether each run of a call gives what the last one gave of equal operands: it draws nothing, and reads what somebody wrote."""
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return not draws and not any(word in str(target) for word in _UNKNOWN)


def fill_of(target: object, args: Sequence[Any]) -> Any:
    """What a call writes everywhere, whatever the operand holds that it is shaped like; None of other calls."""
    if target not in _FILLS:
        return None
    position = _FULL.get(target)
    return (1 if target in _ONES else 0) if position is None else args[position]


class Constants:
    """Evaluates nodes of a FORWARD program on the CPU, each once, floats in float64 as a promoted program would.

    Buffers are state: their values are not known.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._values: dict[Node, torch.Tensor | None] = {
            node: promote_tensor(program.constants[item.name]) if item.kind == "constant" else None for item, node in program.named_inputs()
        }
        self._found: dict[Hashable, Any] = {}
        # When which of their readers reads is not asked: nothing is known of memory that is written.
        self._written = {memory_of(written_by(writer)) for writer in writers_of(program.graph)}
        self._values |= {node: None for node in self._written if node in self._values}

    def once(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` finds out about known values, which `key` says; it is asked once."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def value(self, node: Node) -> torch.Tensor | None:
        """The node's value; None where it is not known, or too large to look at."""
        pending = [node]
        while pending:
            current = pending[-1]
            unseen = [] if current in self._values or not self._is_candidate(current) else self._unseen(current)
            if unseen:
                pending += unseen
                continue
            pending.pop()
            if current not in self._values:
                self._values[current] = self._evaluate(current)
        return self._values[node]

    def number(self, value: Any) -> float | None:
        """A literal, or a tensor that holds the same known number everywhere."""
        if isinstance(value, (bool, int, float)):
            return float(value)
        if not isinstance(value, Node) or (found := self.value(value)) is None or found.is_complex() or found.numel() == 0:
            return None
        if found.numel() > 1:
            smallest = found[(slice(0, 1),) * found.dim()] if all(stride == 0 for stride in found.stride()) else found
            if smallest.numel() > 1 and not bool((smallest == smallest.flatten()[0]).all()):
                return None
            found = smallest
        return float(found.flatten()[0])

    def _unseen(self, node: Node) -> list[Node]:
        if node.target in _FILLS:
            return []
        found: list[Node] = []
        for operand in self._read_by(node):
            if operand not in self._values:
                found.append(operand)
            elif self._values[operand] is None:
                return []
        return found

    @staticmethod
    def _read_by(node: Node) -> Sequence[Node]:
        """The operands whose values count: of what another is spread like, its shape does."""
        return (node_at(node, 0),) if node.target is aten.expand_as.default else operands(node)

    def _is_candidate(self, node: Node) -> bool:
        value = node.meta.get("val")
        fits = node.target in _FILLS or (isinstance(value, torch.Tensor) and value.numel() <= _MOST_ELEMENTS)
        is_known = schema_of(node.target) is not None and not writes_operands(node.target) and gives_the_same(node.target)
        return fits and is_known and (not self._written or memory_of(node) not in self._written)

    def _evaluate(self, node: Node) -> torch.Tensor | None:
        if not self._is_candidate(node):
            return None
        if node.target in _FILLS:
            return self._filled(node)
        if any(self._values.get(operand) is None for operand in self._read_by(node)):
            return None
        if node.target is aten.expand_as.default:
            return self._operand(node.args[0]).expand(node.meta["val"].shape)
        args, kwargs = pytree.tree_map(self._operand, (node.args, dict(node.kwargs)))
        with torch.no_grad(), default_float64():
            found = call_of(node)(*args, **kwargs)
        return found if isinstance(found, torch.Tensor) else None

    def _operand(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return promoted_dtype(leaf)
        return self._values[leaf] if isinstance(leaf, Node) else leaf

    def _filled(self, node: Node) -> torch.Tensor | None:
        """One number in memory, whatever the shape."""
        value = node.meta["val"]
        fill = fill_of(node.target, node.args)
        if isinstance(fill, Node):
            return None
        return torch.full((1,) * value.dim(), fill, dtype=promoted_dtype(value.dtype)).expand(value.shape)
