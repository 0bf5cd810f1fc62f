"""What a schedule says of memory is what its ranks hold, to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule

import autopar
from autopar._torch import fake_mode
from autopar.cost.schedule_memory import peak_bytes
from autopar.errors import ScheduleError
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Fragment, Schedule, parse
from tests.support.models.zoo import Case, gpt2, llama

aten = torch.ops.aten
LAYOUT = ((4, 8), torch.float32)
BYTES = 4 * 8 * 4


@pytest.mark.parametrize(
    ("model", "axes", "schedule", "number"),
    [(gpt2, {"pp": 2, "tp": 2}, "zb-h1", 4), (llama, {"pp": 4}, "1f1b", 8)],
)
def test_predicted_peak_bytes_are_those_that_the_ranks_hold(
    model: Callable[..., Case], axes: dict[str, int], schedule: str, number: int
) -> None:
    case = model(2)
    mesh = autopar.virtual_mesh(**axes)
    parallel = autopar.compile(case.model, mesh, backend="eager", num_microbatches=number, schedule=schedule, example_inputs=case.batch)
    found = parallel.timeline(**case.batch)
    assert dict(found.peak_bytes) == dict(found.predicted_bytes)
    assert len(found.peak_bytes) == math.prod(axes.values())
    assert len(set(found.peak_bytes.values())) == axes["pp"], "stages hold unequal amounts"


@pytest.mark.parametrize(
    ("text", "num_buffers"),
    [
        ("RUN copy (x) -> (y)", 2),
        ("RUN view (x) -> (y)", 1),
        ("RUN view (x) -> (y)\nRUN copy (y) -> (z)", 2),
        ("RUN copy (x) -> (y)\nFREE y\nRUN copy (x) -> (z)", 2),
        ("RUN copy (x) -> (y)\nRUN copy (x) -> (z)\nFREE y z", 3),
        ("ADD total (x)\nADD total (x)", 2),
        ("LAUNCH all_reduce sum dp (x) -> y", 1),
        ("LAUNCH all_reduce sum dp (x) -> y\nWAIT y", 2),
        ("RECV t pp=1 (y, z)\nWAIT t", 3),
        ("RUN copy (x) -> (y)\nSEND t pp=1 (y)\nWAIT t\nFREE y", 2),
    ],
)
def test_buffers_are_counted_by_the_memory_they_lie_in(text: str, num_buffers: int) -> None:
    assert peak_bytes(schedule_of(text)) == num_buffers * BYTES


def test_a_buffer_of_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match="'unknown'"):
        peak_bytes(schedule_of("RECV t pp=1 (unknown)\nWAIT t"))


def schedule_of(text: str) -> Schedule:
    fragments = {"copy": _fragment("copy", aten.neg.default), "view": _fragment("view", aten.t.default)}
    signature = Signature((Input("batch", "0", *LAYOUT),), ())
    return Schedule(parse(text), fragments, ("x",), (), signature, dict.fromkeys(("x", "y", "z", "total"), LAYOUT))


def _fragment(name: str, op: Callable[..., torch.Tensor]) -> Fragment:
    graph = Graph()
    operand = graph.placeholder("a")
    with fake_mode():
        operand.meta["val"] = torch.empty(LAYOUT[0], dtype=LAYOUT[1])
    graph.output((graph.call_function(op, (operand,)),))
    return Fragment(name, GraphModule(torch.nn.Module(), graph))
