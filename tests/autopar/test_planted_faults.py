"""Faults planted into a compiled program, one at a time, that the check names: node, or rank and instruction.

Those that only values show are in `tests/runtime/test_verify_planted_faults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import Node

from autopar._torch import fake_mode
from autopar.checks.checker import violations
from autopar.checks.schedule import check_schedule
from autopar.driver.compiled import Compiled
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_reduce, reshard, wait
from autopar.ir.instructions import Free, Instruction, Launch, Run, Wait
from autopar.ir.keys import DIMS, ORIGIN, SHARDING, STRATEGY
from autopar.ir.program import Program, operands
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import Sharding
from tests.support.faults.compiled import MESH, compile_tiny, consumer, emit_between, first, gathered, reduced_over
from tests.support.schedules import retyped

aten = torch.ops.aten


@pytest.fixture(scope="module")
def tiny() -> Compiled:
    return compile_tiny()


def test_nothing_is_found_where_nothing_was_planted(tiny: Compiled) -> None:
    assert violations(tiny.program) == [] and violations(tiny.local, origin=tiny.program) == []
    assert check_schedule(dict.fromkeys(range(4), tiny.schedules[0]), tiny.local.mesh) == []


# --- faults in the GLOBAL program: the check names the node


def _unreduced_into_relu(program: Program) -> Node:
    """The row-split product is a sum over tp still to be made; the reshard that makes it is left out."""
    node = first(program, lambda node: node.target is reshard and any(axis == "tp" for axis, _ in SHARDING[operands(node)[0]][0].unreduced))
    user = consumer(node)
    user.replace_input_with(node, operands(node)[0])
    return user


def _lost_token_count(program: Program) -> Node:
    """Each dp rank divides by its own number of labels."""
    division = first(program, lambda node: node.target is aten.div.Tensor)
    count = operands(division)[1]
    division.replace_input_with(count, operands(count)[0])
    return division


def _unreduced_loss(program: Program) -> Node:
    total = operands(operands(program.results[0])[0])[0]
    assert SHARDING[total][0].unreduced
    end = program.graph.output_node()
    end.args = ((total, *end.args[0][1:]),)
    return total


def _gradient_unlike_its_parameter(program: Program) -> Node:
    index, gradient = next((i, node) for i, (item, node) in enumerate(program.named_outputs()) if item.name == "up.weight")
    end, whole = program.graph.output_node(), Sharding.replicated(DIMS[gradient][0])
    with program.graph.inserting_before(end):
        gathered = program.graph.call_function(reshard, (gradient, whole))
    gathered.meta = dict(gradient.meta)
    gathered.meta.pop(STRATEGY, None)
    SHARDING[gathered] = (whole,)
    end.args = ((*end.args[0][:index], gathered, *end.args[0][index + 1 :]),)
    return gathered


def _axis_used_twice(program: Program) -> Node:
    node = first(program, lambda node: node.target is aten.relu.default)
    SHARDING[node] = (Sharding((("dp",), (), ("dp",))),)
    return node


def _claimed_linear(program: Program) -> Node:
    """A strategy under which relu would pass a sum still to be made."""
    node = first(program, lambda node: node.target is aten.relu.default)
    summed = Sharding(tuple(() for _ in SHARDING[node][0].splits), (("tp", "sum"),))
    STRATEGY[node] = replace(STRATEGY[node], operands=(summed,), results=(summed,))
    SHARDING[node] = (summed,)
    return node


def _made_unreduced(program: Program) -> Node:
    node = first(program, lambda node: node.target is reshard)
    SHARDING[node] = (replace(Sharding.replicated(DIMS[node][0]), unreduced=(("tp", "sum"),)),)
    return node


def _features_split_by_dp(program: Program) -> Node:
    node = next(node for item, node in program.named_inputs() if item.kind == "batch")
    SHARDING[node] = (Sharding((*((),) * (len(SHARDING[node][0].splits) - 1), ("dp",))),)
    return node


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_unreduced_into_relu, "arrives unreduced (sum over tp)"),
        (_lost_token_count, "operand 1 arrives unreduced (sum over dp"),
        (_unreduced_loss, "the loss is not replicated"),
        (_gradient_unlike_its_parameter, "the gradient of 'up.weight' is not sharded as 'up.weight' is"),
        (_axis_used_twice, "axis 'dp' is used 2 times"),
        (_claimed_linear, "the op's rule does not allow its strategy"),
        (_made_unreduced, "the reshard makes a value unreduced"),
        (_features_split_by_dp, "that is no rank's share"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_the_check_names_faults_in_the_global_program(tiny: Compiled, plant: Callable[[Program], Node], message: str) -> None:
    program = tiny.program.copy()
    node = plant(program)
    found = [violation for violation in violations(program) if message in violation.what]
    assert found, "\n".join(map(str, violations(program)))
    assert found[0].where.startswith(f"%{node.name}")


# --- faults in the LOCAL program that the check names


def _doubled_all_reduce(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    emit = Emitter(program.graph, before=completed.next, like=completed)
    again = emit.call(all_reduce, completed, ("dp",), "sum")
    twice = emit.call(wait, again)
    completed.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not again)
    for key in (ORIGIN, DIMS, SHARDING):
        key[twice] = key[completed]
        del completed.meta[key]
    return again.name


def _wrong_axis(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp") and node.args[1] == ("dp",))
    launch.args = (launch.args[0], ("tp",), "sum")
    return launch.name


def _wrong_kind(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp") and node.args[2] == "sum")
    launch.args = (*launch.args[:2], "max")
    return launch.name


def _unknown_axis(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    launch.args = (launch.args[0], ("ep",), "sum")
    return launch.name


def _wrong_number_of_ranks(program: Program) -> str:
    launch = gathered(program)
    launch.args = (*launch.args[:2], 4)
    return launch.name


def _off_by_one(program: Program) -> str:
    """A literal shape that was not made local: the arange over the vocabulary counts one too many."""
    node = first(program, lambda node: node.target is aten.arange.default and node.meta["val"].numel() == 8)
    node.args = (9, *node.args[1:])
    with fake_mode():
        node.meta["val"] = torch.empty(9, dtype=torch.int64)
    return consumer(node).name


def _literal_left_logical(program: Program) -> str:
    """An expand to the logical shape."""
    node = first(program, lambda node: node.target is aten.expand.default and node in SHARDING and bool(SHARDING[node][0].axes))
    shape = [math.prod(dim) for dim in DIMS[node][0]]
    node.args = (node.args[0], shape)
    with fake_mode():
        node.meta["val"] = torch.empty(shape)
    return node.name


def _missing_wait(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    user = consumer(completed)
    user.replace_input_with(completed, launch)
    return user.name


def _double_wait(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    emit_between(completed, consumer(completed), lambda emit, value: emit.call(wait, launch))
    return launch.name


def _wrong_dtype(program: Program) -> str:
    """Half the bytes on the wire, in a dtype that the receiver does not expect."""
    launch = first(program, lambda node: reduced_over(node, "dp"))
    emit_between(launch.args[0], launch, lambda emit, value: emit.cast(value, torch.bfloat16))
    return launch.name


def _other_operand(program: Program) -> str:
    """A residual branch reads the value before the norm where it should read the one after."""
    node = first(program, lambda node: node.target is aten.relu.default)
    other = first(program, lambda each: each.target is aten.mm.default and each.meta["val"].shape == node.meta["val"].flatten(0, 1).shape)
    emit_between(operands(node)[0], node, lambda emit, value: emit.call(aten.reshape.default, other, list(node.meta["val"].shape)))
    return node.name


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_doubled_all_reduce, "a doubled reduction, or the wrong axis"),
        (_wrong_axis, "a doubled reduction, or the wrong axis"),
        (_wrong_kind, "reduces by the wrong kind"),
        (_unknown_axis, "unknown axis 'ep'"),
        (_wrong_number_of_ranks, "gathers from the wrong number of ranks"),
        (_off_by_one, "not what its op computes"),
        (_literal_left_logical, "the local shape is not this rank's part of"),
        (_missing_wait, "used before its wait"),
        (_double_wait, "exactly one wait"),
        (_wrong_dtype, "not what its op computes"),
        (_other_operand, "does not read"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_the_check_names_faults_in_the_local_program(tiny: Compiled, plant: Callable[[Program], str], message: str) -> None:
    program = tiny.local.copy()
    name = plant(program)
    found = [violation for violation in violations(program, origin=tiny.program) if message in violation.what]
    assert any(violation.where.startswith(f"%{name} ") for violation in found), "\n".join(
        map(str, violations(program, origin=tiny.program))
    )


def test_the_check_names_a_dropped_all_reduce(tiny: Compiled) -> None:
    program = tiny.local.copy()
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed, source = consumer(launch), operands(launch)[0]
    name = ORIGIN[completed]
    completed.replace_all_uses_with(source)
    program.graph.erase_node(completed)
    program.graph.erase_node(launch)
    text = "\n".join(str(violation) for violation in violations(program, origin=tiny.program))
    assert "dropped" in text and f"%{name} " in text


# --- faults in schedules: the check names rank and instruction


def _where(schedule: Schedule, wanted: type, nth: int = 0) -> int:
    return [number for number, each in enumerate(schedule.instructions) if isinstance(each, wanted)][nth]


def _with(schedule: Schedule, *changes: tuple[int, tuple[Instruction, ...]]) -> Schedule:
    """The instructions at these numbers replaced, the last first."""
    instructions = list(schedule.instructions)
    for number, by in sorted(changes, reverse=True):
        instructions[number : number + 1] = by
    return replace(schedule, instructions=tuple(instructions))


def _without_a_wait(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Wait)
    return _with(schedule, (number, ())), "is read before its collective is complete"


def _waits_twice(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Wait)
    return _with(schedule, (number, (schedule.instructions[number],) * 2)), "WAIT without a LAUNCH"


def _reads_after_free(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Run, 2)
    freed = next(name for name in schedule.instructions[number].inputs if name not in schedule.inputs)
    return _with(schedule, (number, (Free((freed,)), schedule.instructions[number]))), "is read after it was freed"


def _frees_in_flight(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Launch)
    launch = schedule.instructions[number]
    return _with(schedule, (number, (launch, Free(launch.sources)))), "is freed while a collective uses it"


def _frees_twice(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Free)
    return _with(schedule, (number, (schedule.instructions[number],) * 2)), "is freed twice"


def _leaks(schedule: Schedule) -> tuple[Schedule, str]:
    return _with(schedule, (_where(schedule, Free), ())), "buffers are never freed"


@pytest.mark.parametrize(
    "plant",
    [_without_a_wait, _waits_twice, _reads_after_free, _frees_in_flight, _frees_twice, _leaks],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_the_check_names_faults_on_one_rank(tiny: Compiled, plant: Callable[[Schedule], tuple[Schedule, str]]) -> None:
    broken, message = plant(tiny.schedules[0])
    found = check_schedule({0: tiny.schedules[0], 1: tiny.schedules[0], 2: broken, 3: tiny.schedules[0]}, MESH)
    named = [violation for violation in found if message in violation.what]
    assert named and named[0].where.startswith("rank 2,"), "\n".join(map(str, found))


def _independent_launches(schedule: Schedule) -> tuple[int, int]:
    """Two launches over one axis that stand next to each other."""
    numbers = [number for number, each in enumerate(schedule.instructions) if isinstance(each, Launch)]
    return next((a, b) for a, b in zip(numbers, numbers[1:], strict=False) if b == a + 1)


def test_the_check_names_a_swapped_collective_order(tiny: Compiled) -> None:
    one, other = _independent_launches(tiny.schedules[0])
    instructions = list(tiny.schedules[0].instructions)
    instructions[one], instructions[other] = instructions[other], instructions[one]
    swapped = replace(tiny.schedules[0], instructions=tuple(instructions))
    found = check_schedule({0: tiny.schedules[0], 1: swapped, 2: tiny.schedules[0], 3: tiny.schedules[0]}, MESH)
    assert found and all("rank 1" in str(violation) for violation in found)


def test_the_check_names_ranks_that_disagree_on_a_dtype(tiny: Compiled) -> None:
    """What gloo turns into garbage without a word."""
    launch = tiny.schedules[0].instructions[_where(tiny.schedules[0], Launch)]
    shape, _ = tiny.schedule.buffers[launch.sources[0]].type
    halved = retyped(tiny.schedules[0], dict.fromkeys((*launch.sources, *launch.targets), (shape, torch.float16)))
    found = check_schedule({0: tiny.schedules[0], 1: halved, 2: tiny.schedules[0], 3: tiny.schedules[0]}, MESH)
    named = [violation for violation in found if violation.what == "two ranks of a group launch different collectives"]
    assert named and "rank 1" in str(named[0]) and "f16" in str(named[0])
