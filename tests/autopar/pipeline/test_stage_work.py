"""What runs where and how often, against the schedules that run."""

from __future__ import annotations

import pytest

from autopar.ir.keys import ORIGIN, STAGE
from autopar.ir.program import Program
from autopar.pipeline.stage_cut import cut_stages
from autopar.pipeline.stage_work import Work
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import interleaved_pipe, parallel_residual, piped, plain_pipe, tied_pipe

PIPES = {"plain": plain_pipe, "interleaved": interleaved_pipe, "one batch": lambda: piped(num_microbatches=1)}


def last(parallel: ParallelModule) -> Program:
    return next(step.program for step in parallel.compiled.steps if step.name == "copy to stages")


@pytest.mark.parametrize("kind", PIPES)
def test_stages_compute_what_their_actions_do(kind: str) -> None:
    compiled = PIPES[kind]().compiled
    work, cut = Work(compiled.program), cut_stages(last(PIPES[kind]()), compiled.order.num_stages)
    for stage in range(compiled.order.num_stages):
        for action, is_forward in (("F", True), ("B", False)):
            ran = {ORIGIN[node] for node in cut.actions[stage, action] if node in ORIGIN}
            said = {node.name for node in work.calls if node not in work.once and work.stages[node].get(stage) == _phase(is_forward)}
            # What is computed ahead, and what lowering leaves out, is no action.
            assert ran <= said, ran - said
        waited = {ORIGIN[node] for node in cut.actions[stage, "I"] if node in ORIGIN}
        assert waited == {node.name for node in work.waited_for(stage)}.intersection(waited)
        rest = {ORIGIN[node] for node in cut.actions[stage, "W"] if node in ORIGIN} - waited
        assert not rest.intersection(node.name for node in work.waited_for(stage))


def _phase(is_forward: bool) -> str:
    return "forward" if is_forward else "backward"


@pytest.mark.parametrize("kind", PIPES)
def test_values_cross_where_they_are_sent(kind: str) -> None:
    compiled = PIPES[kind]().compiled
    sent = cut_stages(last(PIPES[kind]()), compiled.order.num_stages).transfers
    assert {ends: len(nodes) for ends, nodes in Work(compiled.program).crossing.items()} == {
        ends: len(nodes) for ends, nodes in sent.items()
    }


def test_what_runs_once_is_what_is_done_to_sums() -> None:
    compiled = plain_pipe().compiled
    work = Work(compiled.program)
    kinds = {output.kind for output, node in compiled.program.named_outputs() if node in work.once}
    assert kinds == {"gradient"} and all(work.runs(node) == 1 for node in work.once)
    saved = next(node for node in work.calls if node.name.startswith("save"))
    assert work.runs(saved) == 2


def test_gradients_of_two_stages_are_not_added_for_each_microbatch() -> None:
    work = Work(tied_pipe().compiled.program)
    (added,) = work.dropped
    assert {STAGE[each] for each in added.all_input_nodes} == {0, 1}


def test_a_program_without_stages_is_one() -> None:
    work = Work(parallel_residual().compiled.program)
    assert all(list(stages) == [0] for stages in work.stages.values())
    assert not work.once and not work.crossing
