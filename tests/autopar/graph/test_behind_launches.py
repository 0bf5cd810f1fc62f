"""Gradients of weights are computed while collectives of the backward move, and nothing else is reordered."""

from __future__ import annotations

import pytest
from torch.fx import Node

import autopar
from autopar.graph.behind_launches import behind_launches
from autopar.ir.collectives import is_launch
from autopar.ir.instructions import Free, Instruction, Launch, Pause, Run, Wait
from autopar.ir.keys import PHASE
from autopar.ir.schedule import Schedule
from tests.support.models.zoo import Case, gpt2, llama

LAYERS = 2


def compiled(case: Case, **axes: int) -> autopar.ParallelModule:
    """Where links cost nothing no later pass moves anything."""
    return autopar.compile(case.model, autopar.virtual_mesh(**axes), example_inputs=case.batch, backend="eager", cluster="ideal")


def backward_of(parallel: autopar.ParallelModule) -> list[Node]:
    return [node for node in parallel.compiled.forms.local.graph.nodes if PHASE.get(node) == "backward" and node.op == "call_function"]


def between(schedule: Schedule, launch: Launch) -> list[Instruction]:
    """What stands between the launch and the wait for it."""
    there = [each for each in schedule.instructions if not isinstance(each, Free)]
    return there[there.index(launch) + 1 : there.index(Wait(launch.name))]


def launches_of_the_backward(schedule: Schedule) -> list[Launch]:
    pause = next(number for number, each in enumerate(schedule.instructions) if isinstance(each, Pause))
    return [each for each in schedule.instructions[pause:] if isinstance(each, Launch)]


def multiplies(schedule: Schedule, each: Instruction) -> bool:
    return isinstance(each, Run) and any("mm" in str(node.target) for node in schedule.fragments[each.fragment].module.graph.nodes)


def test_gradients_of_weights_stand_behind_every_launch_of_tensor_parallelism() -> None:
    case = gpt2(LAYERS)
    parallel = compiled(case, tp=2)
    (schedule,) = parallel.compiled.schedule.places
    hiding = [each for each in launches_of_the_backward(schedule) if any(multiplies(schedule, one) for one in between(schedule, each))]
    assert len(hiding) >= 2 * LAYERS, "one behind attention's products, one behind the MLP's"
    assert parallel.verify(**case.batch)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.equivalence)])
def test_exact_with_data_parallelism_beside_it(backend: str) -> None:
    """Sums over dp begin while the backward still waits for tp."""
    case = gpt2(LAYERS)
    options = {"example_inputs": case.batch, "backend": backend, "cluster": "ideal"}
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), **options)
    (schedule,) = parallel.compiled.schedule.places
    launches = launches_of_the_backward(schedule)
    axes = [each.axes for each in launches]
    assert axes.index(("dp",)) < len(axes) - 1 - axes[::-1].index(("tp",))
    assert sum(any(multiplies(schedule, one) for one in between(schedule, each)) for each in launches if each.axes == ("tp",)) >= 2 * LAYERS
    assert parallel.verify(**case.batch)


def test_what_only_data_parallelism_splits_keeps_its_order() -> None:
    """Llama has no table of positions, whose gradient is of a sum over samples."""
    nodes = backward_of(compiled(llama(LAYERS), dp=2))
    assert any(map(is_launch, nodes)) and behind_launches(nodes) == (nodes, frozenset())


def test_an_order_in_which_calls_follow_what_they_read() -> None:
    nodes = backward_of(compiled(gpt2(LAYERS), dp=2, tp=2))
    found, ends = behind_launches(nodes)
    assert found != nodes and sorted(found, key=nodes.index) == nodes and ends
    at = {node: number for number, node in enumerate(found)}
    assert all(at[operand] < at[node] for node in found for operand in node.all_input_nodes if operand in at)
