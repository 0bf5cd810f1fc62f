"""What ranks send in a step, of a pipeline with microbatches. (Of a program made by hand: test_inspect.py.)"""

from __future__ import annotations

from autopar.pipeline.stage_work import Work
from autopar.reports.communication import sent, transfers
from autopar.reports.summary import cost_of, places_of
from tests.support.models.residual import WIDTH, WORDS, interleaved_pipe, plain_pipe, tied_pipe


def test_sends_happen_for_each_microbatch_and_reductions_once() -> None:
    compiled = plain_pipe().compiled
    found = list(transfers(compiled.program, cost_of(compiled)))
    sends = [each for each in found if each.collective == "send"]
    assert {(each.axes, each.phase, each.runs, each.stages) for each in sends} == {
        ("pp", "forward", 2, (0,)),
        ("pp", "backward", 2, (1,)),
    }
    reductions = [each for each in found if (each.axes, each.phase, each.collective) == ("dp", "backward", "all_reduce")]
    assert reductions and all(each.runs == 1 for each in reductions)
    assert not any("mb" in each.axes for each in found)


def test_a_rank_sends_for_all_its_stages() -> None:
    compiled = interleaved_pipe().compiled
    cost, places = cost_of(compiled), places_of(compiled)
    sends = [each for each in transfers(compiled.program, cost) if each.collective == "send" and each.phase == "forward"]
    by_rank = [sum(each.runs * each.bytes for each in sends if places[each.stages[0]] == rank) for rank in (0, 1)]
    row = sent(compiled.program, cost, places)["pp", "forward", "send"]
    assert row.bytes == max(by_rank) and row.seconds > 0
    assert min(by_rank) > 0


def test_gradients_of_a_tied_table_are_exchanged_once_a_step() -> None:
    compiled = tied_pipe().compiled
    table = WORDS * WIDTH * 8
    found = [each for each in transfers(compiled.program, cost_of(compiled)) if each.collective == "send" and each.runs == 1]
    assert sorted((each.phase, each.bytes, each.stages) for each in found) == [("backward", table, (0,)), ("backward", table, (1,))]
    on_one_rank = list(transfers(compiled.program, cost_of(compiled), (0, 0)))
    assert not [each for each in on_one_rank if each.collective == "send" and each.runs == 1]
    assert not Work(plain_pipe().compiled.program).ties
