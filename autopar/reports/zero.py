"""What `explain` says of ZeRO: what lies in parts over `dp`, when it is gathered, when gradients are cut, and what stays whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import Node

from autopar.ir.collectives import reshard
from autopar.ir.keys import SHARDING
from autopar.ir.markers import held
from autopar.ir.program import Input, Program
from autopar.ir.units import in_bytes
from autopar.ops.traits import CASTS
from autopar.partition.zero_placements import is_in_parts
from autopar.pipeline.stage_rules import is_copy
from autopar.pipeline.stage_work import Work

_SHOWN = 3
_LEVELS = (
    "whole along dp",
    "in parts with a whole copy, gathered once a step (level 2)",
    "in parts, gathered by each phase (level 3)",
)


def zero_lines(program: Program) -> Iterator[str]:
    """What was asked for, or chosen under a budget; nothing where neither is."""
    zero, mesh = program.freedom.zero, program.mesh
    if zero is None:
        yield from _chosen(program)
        return
    masters = program.freedom.master_axes(mesh)
    if not masters:
        yield f"{zero}: dp has one rank, there is nothing to split"
        return
    wanted = [(item, node) for item, node in program.named_inputs() if is_in_parts(item, program.freedom)]
    parts = [item for item, node in wanted if set(masters) <= set(SHARDING[node][0].axes)]
    size = mesh.size_of(masters)
    replicas = mesh.num_shares // size
    across = f", {replicas} groups of replicas, gradients all-reduced across them" if replicas > 1 else ""
    over = " · ".join(sorted(masters))
    yield f"{zero}: {len(parts)} parameters, their gradients and their optimizer state in {size} parts over {over}{across}"
    yield _copies(program)
    if mesh.num_microbatches > 1:
        when = "after every microbatch, and summed in parts" if zero.cuts_each_microbatch else "once they are summed over the microbatches"
        yield f"gradients are reduce-scattered {when}"
    whole = [item for item, _ in wanted if item not in parts]
    if whole:
        yield f"whole on every rank, for no dim divides by {size}: {_named(whole)}"
    padded = [item for item in parts if item.padding is not None]
    if padded:
        yield f"padded: {_named(padded)}"


def _chosen(program: Program) -> Iterator[str]:
    """How many parameters lie how, where the search was free to choose."""
    if not program.freedom.shards_parameters:
        return
    found = Counter(_level(node, program) for item, node in program.named_inputs() if item.kind == "parameter")
    yield "chosen as memory asks for it: " + ", ".join(f"{found[each]} {each}" for each in _LEVELS if found[each])


def _level(parameter: Node, program: Program) -> str:
    def is_in_parts(node: Node) -> bool:
        return any(map(program.freedom.is_batch, SHARDING[node][0].split_axes))

    if not is_in_parts(parameter):
        return _LEVELS[0]
    pending, copies = [parameter], list[Node]()
    for node in pending:
        copies += [node] if node.target is held else []
        pending += [user for user in node.users if user.target is held or user.target is reshard or user.target in CASTS]
    return _LEVELS[1] if any(not is_in_parts(copy) for copy in copies) else _LEVELS[2]


def _copies(program: Program) -> str:
    zero, work = program.freedom.zero, Work(program)
    assert zero is not None
    copies = [node for node in work.calls if is_copy(node)]
    if not copies:
        return "computed with: gathered for the forward, and anew for the backward"
    num_bytes = sum(node.meta["val"].nbytes for node in copies)
    dtypes = ", ".join(dict.fromkeys(str(node.meta["val"].dtype).removeprefix("torch.") for node in copies))
    how = {1: "whole", 2: "whole"}.get(zero.level, f"in parts over {zero.secondary}" if zero.secondary else "in parts")
    text = f"computed with: copies in {dtypes}, {in_bytes(num_bytes)} in all, {how}, made once a step"
    return text if zero.level < 3 else f"{text}; gathered for the forward, and anew for the backward"


def _named(items: list[Input]) -> str:
    names = [item.name for item in items]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
