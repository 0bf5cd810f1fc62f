"""What ranks execute: the order's actions, each value once, and the same at both ends."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.cost.schedule_memory import schedule_memory
from autopar.ir.instructions import Add, Free, Receive, Run, Send
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.pipeline.cost import PipelineCost, grid_memory
from autopar.pipeline.expand import expand
from autopar.pipeline.schedules import GENERATORS, generate
from tests.support.models.chain import Chain, schedules
from tests.support.programs import PP2
from tests.support.schedules import check_schedules


def transfers(schedule: Schedule, kind: type[Send] | type[Receive]) -> list[Send | Receive]:
    return [each for each in schedule.instructions if isinstance(each, kind)]


@pytest.mark.parametrize("name", GENERATORS)
def test_both_ends_of_every_channel_name_the_same_transfers_in_order(name: str) -> None:
    found = schedules(generate(name, 2, 4))
    check_schedules(found, PP2)
    sent = [each.transfer for each in transfers(found[0], Send)]
    assert sent and sent == [each.transfer for each in transfers(found[1], Receive)]
    assert [each.transfer for each in transfers(found[1], Send)] == [each.transfer for each in transfers(found[0], Receive)]


@pytest.mark.parametrize("name", GENERATORS)
def test_as_many_microbatches_are_saved_as_the_grid_says(name: str) -> None:
    """What a forward makes and a backward reads is told by its role: a pass that offloads could not tell otherwise."""
    order = generate(name, 2, 4)
    grid = grid_memory(expand(order), PipelineCost.uniform(order.num_stages))
    found = [schedule_memory(each).peak_live_microbatches for each in schedules(order)]
    assert found == [each.peak_live_microbatches for each in grid] and max(found) > 1


def test_what_only_the_forward_reads_is_not_saved() -> None:
    (schedule,) = schedules(generate("1f1b", 1, 1), Mesh((("dp", 1),)))
    roles = {buffer.value: buffer.role for buffer in schedule.buffers.values()}
    spans = {span.action: span for span in schedule.spans}
    read = {
        name for each in schedule.instructions[slice(*spans["0B0"][1:])] if isinstance(each, Run) for name in each.inputs
    }  # fmt: skip
    made = {name for each in schedule.instructions[slice(*spans["0F0"][1:])] if isinstance(each, Run) for name in each.outputs}
    assert {name for name, role in roles.items() if role == "saved"} == made & read and made - read


def test_every_buffer_in_the_table_has_a_type() -> None:
    """Those of whole actions, of which nothing says how large they are, are gone."""
    table = schedules(generate("zb-v", 2, 4))[0].buffers
    assert table and all(buffer.type is not None for buffer in table.values())


@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_a_value_that_two_stages_of_a_rank_read_is_sent_there_once(name: str) -> None:
    for schedule in schedules(generate(name, 2, 4)):
        arrived = Counter(name for each in transfers(schedule, Receive) for name in each.buffers)
        assert arrived and max(arrived.values()) == 1


def test_each_rank_has_the_inputs_and_gradients_of_its_stage() -> None:
    first, last = schedules(generate("1f1b", 2, 4))
    names = [{item.name for item in each.signature.inputs_of("parameter")} for each in (first, last)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 10
    for schedule, held in zip((first, last), names, strict=True):
        assert {item.name for item in schedule.signature.outputs_of("gradient")} == held
    assert len(first.fed["batch", "0"]) == 4 and ("batch", "0") not in last.fed
    assert ("loss", "0") in first.left and ("loss", "0") in last.left, "the caller of every rank gets the loss"


def test_gradients_are_added_up_and_each_microbatchs_are_freed() -> None:
    (first, _) = schedules(generate("1f1b", 2, 4))
    added = [each for each in first.instructions if isinstance(each, Add)]
    by_target = Counter(each.target for each in added)
    assert set(by_target.values()) == {4}
    freed = {name for each in first.instructions if isinstance(each, Free) for name in each.buffers}
    assert {each.source for each in added} <= freed


def test_every_rank_gets_the_buffers_that_the_last_microbatch_leaves() -> None:
    for schedule in schedules(generate("1f1b", 2, 4), model=Chain(norm=True)):
        buffers = [item.name for item in schedule.signature.outputs_of("buffer")]
        assert len([name for name in buffers if name.endswith("running_mean")]) == 4
        assert {schedule.left["buffer", name][0].partition("@")[2] for name in buffers} == {"3"}
