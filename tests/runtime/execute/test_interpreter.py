from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Launch, parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Buffer, Fragment, Schedule, TensorType
from autopar.runtime.execute.buckets import BucketMemory, Reserved
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, execute
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport


def transport() -> VirtualTransport:
    return VirtualTransport(Rendezvous(Mesh((("tp", 1),))), 0)


def run(text: str, state: RankState, **functions: object) -> None:
    fragments = {name: Fragment(name, torch.fx.symbolic_trace(function)) for name, function in functions.items()}  # type: ignore[arg-type]
    schedule = Schedule(parse(text), fragments, (), (), Signature((), ()))
    for _ in execute(schedule, state, CompiledFragments(fragments, "eager"), transport()):
        raise AssertionError("a single rank never waits")


def test_pause_keeps_the_buffers_and_goes_on_behind_it() -> None:
    text = "RUN f (a) -> (b)\nPAUSE\nRUN f (b) -> (c)\nFREE b"
    fragments = {"f": Fragment("f", torch.fx.symbolic_trace(lambda x: (x + 1,)))}
    schedule, state = Schedule(parse(text), fragments, (), (), Signature((), ())), RankState({"a": torch.tensor(1)})
    compiled = CompiledFragments(fragments, "eager")
    assert list(execute(schedule, state, compiled, transport())) == []
    assert (state.position, sorted(state.buffers)) == (2, ["a", "b"])
    assert list(execute(schedule, state, compiled, transport())) == []
    assert sorted(state.buffers) == ["a", "c"] and state.buffers["c"].item() == 3


def test_an_error_inside_a_fragment_names_rank_and_instruction() -> None:
    with pytest.raises(RuntimeError) as caught:
        run("FREE z\nRUN f (a, b) -> (c)", RankState({"a": torch.ones(2), "b": torch.ones(3), "z": torch.ones(1)}), f=lambda a, b: (a + b,))
    assert caught.value.__notes__[-1] == "on rank 0, instruction 1: RUN f (a, b) -> (c)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FREE a\nRUN f (a) -> (b)", "buffer 'a' is read before it is written, or after it was freed"),
        ("FREE a\nFREE a", "buffer 'a'"),
        ("WAIT b", "nothing was launched into 'b'"),
        ("LAUNCH all_reduce sum tp (a) -> b\nLAUNCH all_reduce sum tp (a) -> b", "'b' was launched twice"),
        ("RUN f (a) -> (b, c)", "gave 1 results where 2 are named"),
        ("ADD g (b)", "buffer 'b' is read before it is written"),
        ("RUN f (a) -> (b)\nADD b (a)", "buffer 'b' was not made by ADD, and others may share its memory"),
        ("ADD g (a)\nFREE g\nRUN f (a) -> (g)\nADD g (a)", "buffer 'g' was not made by ADD"),
        ("RUN shorter (a) -> (b)\nADD g (a)\nADD g (b)", r"'g' is torch.float32 of \(2,\), 'b' is torch.float32 of \(1,\)"),
        ("RUN longer (a) -> (b)\nADD g (a)\nADD g (b)", "'g' is torch.float32 .* 'b' is torch.float64"),
    ],
)
def test_misused_buffers_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected):
        run(text, RankState({"a": torch.ones(2)}), f=lambda a: (a + 1,), shorter=lambda a: (a[:1],), longer=lambda a: (a.double(),))


def test_add_sums_into_memory_of_its_own() -> None:
    whole = torch.arange(6.0).view(2, 3)
    state = RankState({"a": whole.t(), "b": whole.t() * 10})
    run("ADD g (a)", state)
    first = state.buffers["g"]
    assert first.is_contiguous() and first.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    state.position = 0
    run("ADD g (b)", state)
    state.position = 0
    run("ADD g (a)\nFREE a b", state)
    assert state.buffers["g"] is first and torch.equal(first, whole.t() * 12)
    assert torch.equal(whole, torch.arange(6.0).view(2, 3)), "the sources stay as they are"


def test_a_freed_sum_starts_anew() -> None:
    state = RankState({"a": torch.ones(2)})
    run("ADD g (a)\nADD g (a)\nFREE g\nADD g (a)", state)
    assert state.buffers["g"].tolist() == [1, 1] and state.buffers["g"] is not state.buffers["a"]


def test_what_is_received_needs_a_shape() -> None:
    schedule = Schedule(parse("RECV t tp=1 (h@0)"), {}, (), (), Signature((), ()))
    end = VirtualTransport(Rendezvous(Mesh((("tp", 2),))), 0)
    with pytest.raises(ScheduleError, match="no shape for buffer 'h@0', which is received"):
        list(execute(schedule, RankState({}), CompiledFragments({}, "eager"), end))


@pytest.mark.parametrize(
    ("text", "is_spent"),
    [
        ("RUN f (x) -> (a)", True),
        ("RUN f (x) -> (a)\nRUN same (a) -> (b)", False),  # two names of one tensor
        ("RUN f (x) -> (c)\nRUN same (c) -> (a)\nFREE c", True),
        ("RUN f (x) -> (c)\nRUN same (c) -> (a)", False),
        ("RUN f (x) -> (a)\nRUN view (a) -> (b)", False),
        ("RUN f (x) -> (c)\nRUN view (c) -> (a)", False),
        ("RUN same (x) -> (a)", False),  # what the caller gave
    ],
)
def test_a_collective_may_write_into_memory_that_nothing_else_looks_at(text: str, is_spent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def launch(
        self: VirtualTransport, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool, reserved: Reserved | None
    ) -> object:
        found.append(is_spent)
        return None

    monkeypatch.setattr(VirtualTransport, "launch", launch)
    state = RankState({"x": torch.ones(2, 2)})
    run(f"{text}\nLAUNCH all_reduce sum tp (a) -> s", state, f=lambda x: (x + 1,), same=lambda x: (x,), view=lambda x: (x.t(),))
    assert found == [is_spent]


class _Reserving(VirtualTransport):
    """Has memory for buckets, and notes what is launched in it."""

    def reserve(self, instruction: Launch, layouts: Sequence[TensorType | None]) -> Reserved | None:
        known = [each for each in layouts if each is not None]
        return BucketMemory().reserved(instruction.name, known, torch.device("cpu"))

    def launch(self, instruction: Launch, tensors: Sequence[torch.Tensor], is_spent: bool = False, reserved: Reserved | None = None) -> Any:
        assert reserved is not None
        self.found[:] = [place is tensor for place, tensor in zip(reserved.places, tensors, strict=True)]
        reserved.bucket.pack(tensors, reserved.places)
        self.found.append([each.tolist() for each in reserved.bucket.tensors()])


def test_a_product_that_a_bucket_alone_reads_is_written_into_it() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    products = [graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(3)]
    graph.output((*products, graph.call_function(torch.ops.aten.t.default, (products[1],))))
    text = "RUN f (x) -> (a, b, c, turned)\nLAUNCH all_reduce sum tp (a, b, c) -> (d, e, f)\nRUN g (c) -> (h)"
    fragments = {
        "f": Fragment("f", torch.fx.GraphModule(torch.nn.Module(), graph)),
        "g": Fragment("g", torch.fx.symbolic_trace(lambda x: (x,))),
    }
    buffers = {name: Buffer(name, ((2, 2), torch.float32)) for name in ("a", "b", "c")}
    schedule = Schedule(parse(text), fragments, ("x",), (), Signature((), ()), buffers)
    reserving = _Reserving(Rendezvous(Mesh((("tp", 1),))), 0)
    object.__setattr__(reserving, "found", [])
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    list(execute(schedule, RankState({"x": given}), CompiledFragments(fragments, "eager"), reserving))
    *is_there, values = reserving.found  # type: ignore[attr-defined]
    assert is_there == [True, False, False], "of b there is a view, and c is read again"
    assert values == [(given @ given).tolist()] * 3
