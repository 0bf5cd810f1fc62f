"""Names for the nodes of a graph that hold in another session, and a hash that says whether the graph is the same.

A plan is read back on a graph that is captured anew, whose node names may differ: it calls a node `backward h.0.fc aten.mm 1`,
and is valid where the fingerprints are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch.fx import Node

from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, PHASE, SOURCE
from autopar.ir.printing import op_name, short_dtype
from autopar.ir.program import Program, results_of


def node_keys(program: Program, with_reshards: bool = False) -> dict[Node, str]:
    """A name for each call that does not depend on node names: `backward h.0.fc aten.mm 1`.

    The ordinal counts equal phase, module and op in graph order. Reshards have none unless asked for, so that the names
    are the same before and after they are inserted.
    """
    counts: dict[str, int] = {}
    found: dict[Node, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or (node.target is reshard and not with_reshards):
            continue
        source = SOURCE.get(node)
        place = " ".join((PHASE.get(node) or "forward", source.module if source and source.module else "-", op_name(node.target)))
        found[node] = f"{place} {counts.get(place, 0)}"
        counts[place] = counts.get(place, 0) + 1
    return found


def cut_keys(program: Program, cuts: Sequence[str]) -> tuple[str, ...]:
    """The names in a plan of the nodes, by their names here, that stages begin with."""
    keys = {node.name: key for node, key in node_keys(program, with_reshards=True).items()}
    return tuple(keys[name] for name in cuts)


def fingerprint(program: Program) -> str:
    """A hash of what is computed: ops, literals, operands, shapes, dtypes, atoms.

    Node names, reshards, meshes and which kernel computes it do not count.
    """
    numbers: dict[Node, int] = {}
    inputs = {node: f"{item.kind} {item.name}" for item, node in program.named_inputs()}
    digest, count = hashlib.sha256(), 0
    for node in program.graph.nodes:
        if node.target is reshard:
            numbers[node] = numbers[node.args[0]]
            continue
        count += 1
        numbers[node] = count
        options = {name: value for name, value in node.kwargs.items() if name != "implementation"}
        called = inputs.get(node) or f"{op_name(node.target)} {_argument((node.args, options), numbers)}"
        values = " ".join(f"{short_dtype(value.dtype)}{tuple(value.shape)}" for value in results_of(node) if value is not None)
        digest.update(f"{node.op} {called} {values} {DIMS.get(node)}\n".encode())
    return digest.hexdigest()[:32]


def _argument(value: object, numbers: Mapping[Node, int]) -> str:
    """Arguments as text in which nodes are numbers."""
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_argument(item, numbers) for item in value)})"
    if isinstance(value, dict):
        return f"({', '.join(f'{name}={_argument(item, numbers)}' for name, item in value.items())})"
    return op_name(value) if callable(value) else repr(value)
