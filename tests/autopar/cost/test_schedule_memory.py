"""What a schedule says of memory is what its ranks hold, to the byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule

import autopar
from autopar._torch import fake_mode
from autopar.cost import memory_walk
from autopar.cost.rank_memory import Sizes
from autopar.cost.schedule_memory import peak_bytes, peak_bytes_on_processes, schedule_memory
from autopar.errors import ScheduleError
from autopar.ir.instructions import parse
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Buffer, Fragment, Schedule, Span
from tests.support.models.zoo import Case, gpt2, llama
from tests.support.schedules import buffers_of, retyped

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


def test_each_instruction_that_makes_or_drops_a_buffer_is_a_step() -> None:
    found = schedule_memory(schedule_of("RUN copy (x) -> (y)\nSEND t pp=1 (y)\nWAIT t\nRUN view (y) -> (z)\nFREE y\nFREE z"))
    assert [(step.position, step.during_bytes, step.after_bytes) for step in found.steps] == [
        (0, 2 * BYTES, 2 * BYTES),
        (3, 2 * BYTES, 2 * BYTES),
        (4, 2 * BYTES, 2 * BYTES),  # the view lies there still
        (5, 2 * BYTES, BYTES),
    ]
    assert (found.held_bytes, found.peak_bytes, found.peak_live_microbatches) == (BYTES, 2 * BYTES, 0)


def test_what_a_schedule_does_not_say_is_given() -> None:
    """Actions that no fragment is known of: sizes, working bytes, what is there all the time, when receives take memory."""
    schedule = replace(schedule_of("RECV t pp=1 (y)\nWAIT t\nRUN action (y) -> (z)\nFREE y z"), inputs=(), fragments={})
    sizes = Sizes({"y": 3, "z": 5}.__getitem__, lambda run: 7 if run.fragment == "action" else 0, 100)
    assert [step[:3] for step in schedule_memory(schedule, sizes).steps] == [(1, 103, 103), (2, 115, 108), (3, 108, 100)]
    assert [step[:3] for step in schedule_memory(schedule, replace(sizes, arrival="launch")).steps][0] == (0, 103, 103)
    groups = [schedule.instructions[:2], schedule.instructions[2:]]
    assert [step[:3] for step in schedule_memory(schedule, sizes, groups).steps] == [(0, 103, 103), (1, 115, 100)]


def test_what_a_caller_passes_is_there_all_the_time_and_what_it_gets_from_pause_on() -> None:
    schedule = replace(schedule_of("RUN action (x) -> (y)\nPAUSE\nRUN action (y) -> (z)\nFREE y"), inputs=(), fragments={})
    sizes = Sizes({"y": 3, "z": 5}.__getitem__, given_bytes=100, taken_bytes=20)
    found = schedule_memory(schedule, sizes)
    assert found.held_bytes == 100
    assert [step[:3] for step in found.steps] == [(0, 103, 103), (1, 123, 123), (2, 128, 128), (3, 128, 125)]
    assert found.steps[2].kinds["inputs"] == 100 and found.steps[2].kinds["activations"] == 28


def test_a_microbatch_lives_while_a_value_of_it_is_saved() -> None:
    text = "RUN copy (x) -> (a)\nRUN copy (x) -> (b)\nRUN copy (x) -> (c)\nRUN copy (x) -> (d)\n"
    text += "RUN copy (a) -> (e)\nRUN copy (b) -> (f)\nFREE a\nFREE b c d\nRUN copy (c) -> (g)"
    saved = {name: Buffer(name, LAYOUT, number, "saved") for name, number in (("a", 0), ("b", 0), ("c", 1), ("d", 2))}
    spans = (Span("0F0", 0, 2), Span("0F1", 2, 4), Span("0B0", 4, 6), Span("0B1", 8, 9))
    schedule = schedule_of(text)
    found = schedule_memory(replace(schedule, buffers={**schedule.buffers, **saved}, spans=spans))
    live = {step.position: step.live_microbatches for step in found.steps}
    assert live == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 0}, "nothing here reads d, a value of microbatch 2"
    assert found.peak_live_microbatches == 2


def schedule_of(text: str) -> Schedule:
    fragments = {"copy": _fragment("copy", aten.neg.default), "view": _fragment("view", aten.t.default)}
    signature = Signature((Input("batch", "0", *LAYOUT),), ())
    return Schedule(parse(text), fragments, ("x",), (), signature, buffers_of(text, dict.fromkeys(("x", "y", "z", "total"), LAYOUT)))


def _fragment(name: str, op: Callable[..., torch.Tensor]) -> Fragment:
    graph = Graph()
    operand = graph.placeholder("a")
    with fake_mode():
        operand.meta["val"] = torch.empty(LAYOUT[0], dtype=LAYOUT[1])
    graph.output((graph.call_function(op, (operand,)),))
    return Fragment(name, GraphModule(torch.nn.Module(), graph))


@pytest.mark.parametrize(
    ("collective", "taken"), [("all_reduce", 2), ("all_gather", 4 + 4), ("reduce_scatter", 2 + 4)], ids=["reduce", "gather", "scatter"]
)
def test_a_bucket_is_kept_by_processes_and_takes_more_under_way(collective: str, taken: int) -> None:
    """In units of the smaller of what it takes and gives, besides the operands: the bucket, what is under way, and gathered results."""
    kind = "copy" if collective == "all_gather" else "sum"
    shapes = {"all_reduce": (16, 16), "all_gather": (16, 32), "reduce_scatter": (32, 16)}[collective]
    types = {name: ((shape,), torch.float32) for names, shape in zip(("ab", "cd"), shapes, strict=True) for name in names}
    buffers = {name: Buffer(name, each) for name, each in types.items()}
    text = f"LAUNCH {collective} {kind} dp (a, b) -> (c, d)\nWAIT c"
    typed = Schedule(parse(text), {}, ("a", "b"), ("c", "d"), Signature((), ()), buffers)
    assert peak_bytes_on_processes(typed) == 64 * (shapes[0] // 16 * 2 + taken)
    assert peak_bytes(typed) == 4 * 2 * sum(shapes)
    by_gloo = schedule_memory(typed, Sizes(typed.bytes_of, arrival="launch", over_gloo=True))
    arriving = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 4}  # what is gathered is copied out when gloo's memory is gone
    assert by_gloo.peak_bytes == 64 * (shapes[0] // 16 * 2 + taken + arriving[collective])


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize(("collective", "shapes"), [("all_gather", (16, 32)), ("reduce_scatter", (32, 16)), ("all_reduce", (16, 16))])
def test_over_gloo_there_is_more_until_the_wait(
    collective: str, shapes: tuple[int, int], is_paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is sent or arrives, once more; between pairs of ranks what the other one sends of a sum."""
    monkeypatch.setattr(memory_walk, "PAIRED_BYTES", 128 if is_paired else 129)
    buffers = {name: Buffer(name, ((size,), torch.float32)) for name, size in zip("ab", shapes, strict=True)}
    instructions = parse(f"LAUNCH {collective} {'copy' if collective == 'all_gather' else 'sum'} dp (a) -> b\nWAIT b\nFREE b")
    typed = Schedule(instructions, {}, ("a",), (), Signature((), ()), buffers)
    found = [schedule_memory(typed, Sizes(typed.bytes_of, arrival="launch", over_gloo=each)) for each in (False, True)]
    more = {"all_reduce": 0, "all_gather": 0 if is_paired else 2, "reduce_scatter": 1 if is_paired else 2}
    assert found[1].peak_bytes - found[0].peak_bytes == 64 * more[collective]
    assert found[1].steps[-1].after_bytes == found[0].steps[-1].after_bytes == 64 * shapes[0] // 16


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_over_gloo_several_parts_in_half_precision_are_added_up_in_float32(dtype: torch.dtype, units: int) -> None:
    buffers = {"a": Buffer("a", ((4 * 16,), dtype)), "b": Buffer("b", ((16,), dtype))}
    typed = Schedule(parse("LAUNCH reduce_scatter sum dp (a) -> b\nWAIT b\nFREE b"), {}, ("a",), (), Signature((), ()), buffers)
    found = [schedule_memory(typed, Sizes(typed.bytes_of, arrival="launch", over_gloo=each)) for each in (False, True)]
    assert found[1].peak_bytes - found[0].peak_bytes == units * 16 * dtype.itemsize


def test_parts_of_a_bucket_begin_where_kernels_like_it() -> None:
    types = dict.fromkeys("abcd", ((5,), torch.float32))
    buffers = {name: Buffer(name, each) for name, each in types.items()}
    instructions = parse("LAUNCH all_reduce sum dp (a, b) -> (c, d)\nWAIT c\nFREE c d")
    typed = Schedule(instructions, {}, ("a", "b"), (), Signature((), ()), buffers)
    found = schedule_memory(typed, Sizes(typed.bytes_of, arrival="launch"))
    assert found.held_bytes == found.peak_bytes == 2 * 20 + 2 * 64


@pytest.mark.parametrize(
    ("before", "units"), [("RUN copy (x) -> (y)", 2), ("RUN copy (x) -> (w)\nRUN view (w) -> (y)", 3), ("RUN view (x) -> (y)", 2)]
)
def test_what_nothing_else_looks_at_is_reduced_where_it_lies_on_processes(before: str, units: int) -> None:
    typed = replace(schedule_of(f"{before}\nLAUNCH all_reduce sum dp (y) -> z\nWAIT z\nFREE y"), outputs=("z",))
    size = typed.bytes_of("x")
    typed = retyped(typed, dict.fromkeys("wz", LAYOUT))
    assert schedule_memory(typed, Sizes(typed.bytes_of, arrival="launch")).peak_bytes == units * size
