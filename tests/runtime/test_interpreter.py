import pytest
import torch

from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.program import Signature
from autopar.runtime.fragments import CompiledFragments
from autopar.runtime.interpreter import RankState, execute
from autopar.runtime.virtual import Switchboard, VirtualTransport
from autopar.schedule import Fragment, Schedule, parse


def transport() -> VirtualTransport:
    return VirtualTransport(Switchboard(Mesh((("tp", 1),))), 0)


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
    ],
)
def test_misused_buffers_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected):
        run(text, RankState({"a": torch.ones(2)}), f=lambda a: (a + 1,))
