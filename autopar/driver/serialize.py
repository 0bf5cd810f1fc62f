"""A compiled call as bytes, and back in another process: what ranks run and what the runtime reads beside it.

Its `forms` do not travel: whoever reads it gives a way to make them. Ops and keys go by their names, a fake tensor by what describes
it, nodes of a fragment by their number. The structure of the user's output, which may have classes of theirs, is given by the reader.
What means nothing in another process is a `CannotTravel`.

Bytes are read by pickle, so whoever writes them can run code where they are read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from autopar._torch import FakeTensorMode
from autopar.driver.compiled import TENSOR, CallFacts, Compiled, Forms
from autopar.driver.pickled import READER, Pickler, Unpickler
from autopar.ir import keys
from autopar.ir.program import Signature
from autopar.pipeline.schedule_program import ScheduleProgram


class CannotTravel(Exception):
    """Something of a compiled call means nothing to another process."""


@dataclass(frozen=True)
class _Number:
    """Stands for the node of a graph that is so many nodes behind the first."""

    number: int


def dumped(compiled: Compiled) -> bytes:
    """All of `compiled` but its forms. Raises `CannotTravel`."""
    updating = compiled.updating and replace(compiled.updating, cut=None)
    value = (
        replace(compiled.schedule, cut=None),
        compiled.facts,
        compiled.plan,
        updating,
        compiled.budget,
        compiled.offload,
        compiled.weighed,
    )
    file = io.BytesIO()
    try:
        _Pickler(file).dump((compiled.fingerprint, value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CannotTravel(str(error)) from error
    return file.getvalue()


def loaded(content: bytes, structure: Any, leaves: tuple[Any, ...], make_forms: Callable[[], Forms]) -> Compiled:
    """What `dumped` gave as `content`, for a call whose output has this `structure` with these `leaves`.

    Raises `CannotTravel` for a program that prints otherwise than the one that was written; for other bytes whatever pickle raises.
    """
    unpickler = _Unpickler(content, {"structure": structure, "leaves": leaves})
    fingerprint, (schedule, facts, plan, updating, budget, offload, weighed) = cast("tuple[str, tuple[Any, ...]]", unpickler.load())
    if not isinstance(schedule, ScheduleProgram) or not isinstance(facts, CallFacts):
        raise CannotTravel(f"no compiled call, but a {type(schedule).__name__}")
    found = Compiled(schedule, facts, make_forms, plan, updating, budget, offload, weighed)
    if found.fingerprint != fingerprint:
        raise CannotTravel("what was read is another program than the one that was written")
    return found


class _Pickler(Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, GraphModule):
            return _module, (_rows(value.graph),)
        if isinstance(value, Signature):
            return _signature, (READER, value.inputs, value.outputs, value.checks, value.guessed)
        if isinstance(value, (Graph, Node, FakeTensorMode)) or value is TENSOR:
            raise CannotTravel(f"a {type(value).__name__} outside of a fragment")
        return super().reducer_override(value)


class _Unpickler(Unpickler):
    """Is `given` what does not travel."""

    def __init__(self, content: bytes, given: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.given = given


def _rows(graph: Graph) -> list[tuple[Any, ...]]:
    numbers: dict[Node, Any] = {node: _Number(number) for number, node in enumerate(graph.nodes)}
    rows: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        if node.op == "get_attr":
            raise CannotTravel(f"a fragment that reads the attribute {node.target}")
        records = {key: value for key, value in node.meta.items() if isinstance(key, keys.Key) or key == "val"}
        given = torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        rows.append((node.op, node.name, node.target, given, records))
    return rows


def _module(rows: list[tuple[Any, ...]]) -> GraphModule:
    graph, nodes = Graph(), list[Node]()

    def back(value: Any) -> Any:
        return nodes[value.number] if isinstance(value, _Number) else value

    for op, name, target, given, records in rows:
        args, kwargs = cast("tuple[Any, Any]", map_aggregate(given, back))
        node = graph.create_node(op, target, args, kwargs, name)
        node.name, node.meta = name, records
        nodes.append(node)
    return GraphModule(torch.nn.Module(), graph)


def _signature(
    reader: _Unpickler, inputs: tuple[Any, ...], outputs: tuple[Any, ...], checks: tuple[str, ...], guessed: tuple[str, ...]
) -> Signature:
    return Signature(inputs, outputs, reader.given["structure"], reader.given["leaves"], checks, guessed)
