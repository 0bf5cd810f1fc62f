"""Stages that share a parameter send each other their part of its gradient, once a step, and add in one order."""

from __future__ import annotations

from autopar.ir.instructions import Add, Receive, Send, Wait
from autopar.ir.mesh import Mesh
from autopar.passes.schedule.exchange_ties import ExchangeTies
from autopar.passes.schedule.reduce_gradients import ReduceGradients
from autopar.pipeline.schedules import generate
from tests.support.models.chain import Tied, schedule_after
from tests.support.programs import PP2


def test_without_ties_it_returns_what_it_got() -> None:
    program = schedule_after(ReduceGradients, generate("1f1b", 2, 2))
    assert ExchangeTies().apply(program) is program


def test_each_part_goes_to_the_other_stage_once_and_all_add_in_one_order() -> None:
    before, after = (schedule_after(last, generate("1f1b", 2, 4), PP2, Tied()) for last in (ReduceGradients, ExchangeTies))
    exchanges = []
    for old, new in zip(before.places, after.places, strict=True):
        assert new.instructions[: len(old.instructions) - 1] == old.instructions[:-1], "before PAUSE, at the end"
        exchanges.append(new.instructions[len(old.instructions) - 1 : -1])
    sent, received = ([[each.transfer for each in row if isinstance(each, kind)] for row in exchanges] for kind in (Send, Receive))
    assert all(len(row) == 1 for row in sent) and sent == received[::-1]
    assert [{each.target for each in row if isinstance(each, Wait)} for row in exchanges] == [
        set(sum(pair, [])) for pair in zip(sent, received, strict=True)
    ]
    added = [[each for each in row if isinstance(each, Add)] for row in exchanges]
    assert added[0] == added[1] and len(added[0]) == 2, "equal sums, bit by bit"
    assert all(after.buffers[name].role == "sum" for each in added[0] for name in (each.target, each.source))


def test_stages_on_one_rank_send_nothing() -> None:
    """ZB-V puts the first stage and the last one on the same ranks."""
    program = schedule_after(ExchangeTies, generate("zb-v", 2, 2), Mesh((("pp", 2),)), Tied())
    tied = [
        each for schedule in program.places for each in schedule.instructions if isinstance(each, Send) and each.transfer.startswith("tied")
    ]
    assert not tied
