"""One broken invariant, and how a list of them reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.keys import SOURCE
from autopar.ir.printing import op_name


@dataclass(frozen=True)
class Violation:
    """What is wrong, where (node and the user's source line, or rank and instruction), what should be, what is, how to mend it.

    `instructions` are those that it is about, each by its rank and its number there; one past the last means the end.
    """

    what: str
    where: str = ""
    expected: str = ""
    got: str = ""
    fix: str = ""
    # Whether the graph is too broken for other invariants to mean anything.
    is_fatal: bool = False
    instructions: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        details = (("expected", self.expected), ("got", self.got), ("fix", self.fix))
        return "\n".join([head, *(f"    {name + ':':<9} {text}" for name, text in details if text)])


def at(node: Node) -> str:
    """`%mm_3 = aten.mm, model.py:41 in transformer.h.0`: a node as errors name it."""
    name = f"%{node.name} = {op_name(node.target)}" if node.op == "call_function" else f"%{node.name} ({node.op})"
    source = SOURCE.get(node)
    return f"{name}, {source}" if source else name


def report(violations: Sequence[Violation], title: str) -> str:
    """All violations, numbered, under one title."""
    count = f"{len(violations)} violation{'s' if len(violations) != 1 else ''}"
    return "\n".join([f"{title}: {count}", *(f"{number}. {violation}" for number, violation in enumerate(violations, 1))])
