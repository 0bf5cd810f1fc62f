import pytest
import torch

from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.program import Signature
from autopar.runtime.fragments import CompiledFragments
from autopar.runtime.interpreter import RankState, execute
from autopar.runtime.virtual import Switchboard, VirtualTransport, collect, drive
from autopar.schedule import Launch, Schedule, parse

TWO = Mesh((("tp", 2),))


def run(texts: list[str], buffers: list[dict[str, torch.Tensor]], mesh: Mesh = TWO) -> list[RankState]:
    """Run one schedule per rank: unlike the compiler's, they may differ."""
    board, states, executions = Switchboard(mesh), [RankState(held) for held in buffers], []
    for rank, text in enumerate(texts):
        schedule = Schedule(parse(text), {}, (), (), Signature((), ()))
        executions.append(execute(schedule, states[rank], CompiledFragments({}, "eager"), VirtualTransport(board, rank)))
    drive(executions)
    board.check_empty()
    return states


def test_collectives_mean_what_launch_says() -> None:
    x = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])]

    def results(collective: str, kind: str) -> list[list[float]]:
        return [result.tolist() for result in collect(Launch(collective, kind, ("tp",), "a", "b"), x)]  # type: ignore[arg-type]

    assert results("all_reduce", "sum") == [[[11, 22], [33, 44]]] * 2
    assert results("all_reduce", "max") == [[[10, 20], [30, 40]]] * 2
    assert results("all_gather", "copy") == [[[[1, 2], [3, 4]], [[10, 20], [30, 40]]]] * 2
    assert results("reduce_scatter", "sum") == [[11, 22], [33, 44]]
    assert results("all_to_all", "copy") == [[[1, 2], [10, 20]], [[3, 4], [30, 40]]]
    assert x[0].tolist() == [[1, 2], [3, 4]]


def test_groups_of_several_axes_follow_the_order_of_the_axes() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    text = "LAUNCH all_gather copy tp,dp (a) -> b\nWAIT b"
    states = run([text] * 4, [{"a": torch.tensor(float(rank))} for rank in range(4)], mesh)
    assert [state.buffers["b"].tolist() for state in states] == [[0, 2, 1, 3]] * 4


def test_deadlock_names_what_every_rank_waits_for() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    first = "LAUNCH all_reduce sum tp (a) -> b\nWAIT b\nLAUNCH all_reduce sum dp (a) -> c\nWAIT c"
    second = "LAUNCH all_reduce sum dp (a) -> c\nWAIT c\nLAUNCH all_reduce sum tp (a) -> b\nWAIT b"
    with pytest.raises(ScheduleError) as caught:
        run([first, second, second, first], [{"a": torch.ones(1)} for _ in range(4)], mesh)
    text = str(caught.value)
    assert "deadlock" in text
    assert "rank 0 waits at instruction 1 for LAUNCH all_reduce sum tp (a) -> b: rank 1 did not launch it" in text
    assert "rank 1 waits at instruction 1 for LAUNCH all_reduce sum dp (a) -> c: rank 3 did not launch it" in text


@pytest.mark.parametrize(
    ("text", "buffer", "expected"),
    [
        ("LAUNCH all_gather copy tp (a) -> b", torch.ones(2), "collective all_reduce on rank 0 and all_gather on rank 1"),
        ("LAUNCH all_reduce max tp (a) -> b", torch.ones(2), "kind sum on rank 0 and max on rank 1"),
        ("LAUNCH all_reduce sum tp (a) -> b", torch.ones(3), r"shape \(2,\) on rank 0 and \(3,\) on rank 1"),
        ("LAUNCH all_reduce sum tp (a) -> b", torch.ones(2).double(), "dtype torch.float32 on rank 0 and torch.float64 on rank 1"),
    ],
)
def test_mismatch_names_ranks_and_both_values(text: str, buffer: torch.Tensor, expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected) as caught:
        run(["LAUNCH all_reduce sum tp (a) -> b\nWAIT b", text + "\nWAIT b"], [{"a": torch.ones(2)}, {"a": buffer}])
    assert any("on rank 1, instruction 0" in note for note in caught.value.__notes__)


def test_a_launch_that_a_rank_skips_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 launched LAUNCH all_reduce .* but rank 1 never did"):
        run(["LAUNCH all_reduce sum tp (a) -> b", "FREE a"], [{"a": torch.ones(2)}, {"a": torch.ones(2)}])


def test_launches_match_in_issue_order_whatever_the_order_of_waits() -> None:
    text = "LAUNCH all_reduce sum tp (a) -> x\nLAUNCH all_reduce max tp (a) -> y\n"
    states = run([text + "WAIT x\nWAIT y", text + "WAIT y\nWAIT x"], [{"a": torch.tensor(1.0)}, {"a": torch.tensor(5.0)}])
    assert [(state.buffers["x"].item(), state.buffers["y"].item()) for state in states] == [(6, 5), (6, 5)]
