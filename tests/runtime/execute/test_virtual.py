import pytest
import torch

from autopar.errors import ScheduleError
from autopar.ir.instructions import Launch, parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, execute
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport, collect, drive
from tests.support.schedules import buffers_of

TWO = Mesh((("tp", 2),))
STAGES = Mesh((("pp", 2),))
SHAPES = dict.fromkeys(("a", "b", "h", "d"), ((2,), torch.float32))


def run(texts: list[str], buffers: list[dict[str, torch.Tensor]], mesh: Mesh = TWO) -> list[RankState]:
    """Run one schedule per rank; they may differ."""
    rendezvous, states, executions = Rendezvous(mesh), [RankState(held) for held in buffers], []
    for rank, text in enumerate(texts):
        schedule = Schedule(parse(text), {}, (), (), Signature((), ()), buffers_of(text, SHAPES))
        executions.append(execute(schedule, states[rank], CompiledFragments({}, "eager"), VirtualTransport(rendezvous, rank)))
    drive(executions)
    rendezvous.check_empty()
    return states


def test_collectives_mean_what_launch_says() -> None:
    x = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])]

    def results(collective: str, kind: str) -> list[list[float]]:
        return [result.tolist() for result in collect(Launch(collective, kind, ("tp",), ("a",), ("b",)), x)]  # type: ignore[arg-type]

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


# ---- transfers


def two(values: float) -> torch.Tensor:
    return torch.full((2,), values, dtype=torch.float32)


def test_two_ranks_that_send_to_each_other_first_get_the_very_tensors() -> None:
    first = "SEND x>y pp=1 (a)\nRECV y>x pp=1 (b)\nWAIT x>y\nWAIT y>x\nFREE a"
    second = "SEND y>x pp=0 (a)\nRECV x>y pp=0 (b)\nWAIT y>x\nWAIT x>y\nFREE a"
    sent = [two(1), two(2)]
    states = run([first, second], [{"a": sent[0]}, {"a": sent[1]}], STAGES)
    assert states[0].buffers == {"b": sent[1]} and states[1].buffers == {"b": sent[0]}
    assert states[0].buffers["b"] is sent[1] and states[1].buffers["b"] is sent[0]


def test_values_go_down_and_up_a_line_of_three_stages_beside_a_second_one() -> None:
    """On dp = 2, the ranks of each replica talk among themselves, and transfers of a channel meet in issue order."""
    first = "SEND 0F0>1 pp=1 (a)\nSEND 0F1>1 pp=1 (b)\nRECV 1B0>0 pp=1 (d@0)\nRECV 1B1>0 pp=1 (d@1)\n"
    first += "WAIT 1B1>0\nWAIT 1B0>0\nWAIT 0F0>1\nWAIT 0F1>1\nADD g (d@0)\nADD g (d@1)\nFREE d@0 d@1"
    middle, last = "", ""
    for m in (0, 1):
        middle += f"RECV 0F{m}>1 pp=0 (h@{m})\nWAIT 0F{m}>1\nSEND 1F{m}>2 pp=2 (h@{m})\nRECV 2B{m}>1 pp=2 (d@{m})\nWAIT 1F{m}>2\n"
        middle += f"WAIT 2B{m}>1\nSEND 1B{m}>0 pp=0 (d@{m})\nWAIT 1B{m}>0\nFREE h@{m} d@{m}\n"
        last += f"RECV 1F{m}>2 pp=1 (h@{m})\nWAIT 1F{m}>2\nADD s@{m} (h@{m})\nADD s@{m} (h@{m})\n"
        last += f"SEND 2B{m}>1 pp=1 (s@{m})\nWAIT 2B{m}>1\nFREE h@{m} s@{m}\n"
    mesh = Mesh((("dp", 2), ("pp", 3)))
    buffers = [{"a": two(1), "b": two(10)}, {}, {}, {"a": two(5), "b": two(50)}, {}, {}]
    states = run([first, middle, last] * 2, buffers, mesh)
    assert [states[rank].buffers["g"].tolist() for rank in (0, 3)] == [[22, 22], [110, 110]]
    assert [sorted(state.buffers) for state in states] == [["a", "b", "g"], [], []] * 2


def test_a_send_is_not_complete_before_the_receiver_has_launched() -> None:
    """A rendezvous, as on NCCL: a schedule that counts on buffered sends stops here."""
    first = "SEND x>y pp=1 (a)\nWAIT x>y\nRECV y>x pp=1 (b)\nWAIT y>x"
    second = "SEND y>x pp=0 (a)\nWAIT y>x\nRECV x>y pp=0 (b)\nWAIT x>y"
    with pytest.raises(ScheduleError) as caught:
        run([first, second], [{"a": two(1)}, {"a": two(2)}], STAGES)
    text = str(caught.value)
    assert "deadlock: no rank can go on" in text
    assert "rank 0 waits at instruction 1 for SEND x>y to rank 1: rank 1 never launched RECV x>y" in text
    assert "rank 1 waits at instruction 1 for SEND y>x to rank 0: rank 0 never launched RECV y>x" in text


def test_a_receive_that_nobody_sends_is_named_beside_a_blocked_collective() -> None:
    mesh = Mesh((("pp", 2), ("tp", 2)))
    receiver = "RECV 0F2>1 pp=0 (h@2)\nWAIT 0F2>1\nLAUNCH all_reduce sum tp (h@2) -> r\nWAIT r"
    other = "LAUNCH all_reduce sum tp (a) -> r\nWAIT r"
    with pytest.raises(ScheduleError) as caught:
        run(["FREE a", "FREE a", receiver, other], [{"a": two(1)} for _ in range(4)], mesh)
    text = str(caught.value)
    assert "rank 2 waits at instruction 1 for RECV 0F2>1 from rank 0: rank 0 never launched SEND 0F2>1 (transfer 1 from rank 0" in text
    assert "rank 3 waits at instruction 1 for LAUNCH all_reduce sum tp (a) -> r: rank 2 did not launch it" in text


def test_transfers_that_differ_at_their_ends_are_refused() -> None:
    text = "SEND t pp=1 (a)\nWAIT t"
    with pytest.raises(ScheduleError, match=r"shape of a → b \(3,\) on rank 0 and \(2,\) on rank 1") as caught:
        run([text, "RECV t pp=0 (b)\nWAIT t"], [{"a": torch.ones(3)}, {}], STAGES)
    assert any("on rank 1, instruction 0: RECV t pp=0 (b)" in note for note in caught.value.__notes__)
    swapped = "RECV u pp=0 (b)\nRECV t pp=0 (d)\nWAIT t\nWAIT u"
    with pytest.raises(ScheduleError, match="transfer 1 from rank 0 to rank 1 differs at its ends: name t on rank 0 and u on rank 1"):
        run([f"{text}\nSEND u pp=1 (a)\nWAIT u", swapped], [{"a": two(1)}, {}], STAGES)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["SEND t pp=1 (a)", "FREE a"], "rank 0 launched SEND t to rank 1: rank 1 never launched RECV t"),
        (["FREE a", "RECV t pp=0 (b)"], "rank 1 launched RECV t from rank 0: rank 0 never launched SEND t"),
    ],
)
def test_a_transfer_with_one_end_is_named(texts: list[str], expected: str) -> None:
    with pytest.raises(ScheduleError, match=expected):
        run(texts, [{"a": two(1)}, {"a": two(2)}], STAGES)


def test_a_blocked_rank_is_described_by_its_own_launch() -> None:
    """Stages name their buffers differently."""
    mesh = Mesh((("tp", 3),))
    texts = ["LAUNCH all_reduce sum tp (a) -> mine\nWAIT mine", "LAUNCH all_reduce sum tp (b) -> yours\nWAIT yours", "FREE a"]
    with pytest.raises(ScheduleError) as caught:
        run(texts, [{"a": two(1), "b": two(1)} for _ in range(3)], mesh)
    assert "rank 0 waits at instruction 1 for LAUNCH all_reduce sum tp (a) -> mine: rank 2 did not" in str(caught.value)
    assert "rank 1 waits at instruction 1 for LAUNCH all_reduce sum tp (b) -> yours: rank 2 did not" in str(caught.value)
