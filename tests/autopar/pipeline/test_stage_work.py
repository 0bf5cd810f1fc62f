"""What runs where and how often, against the schedules that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import pytest
from torch.fx import Node

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.ir.keys import ORIGIN, STAGE
from autopar.pipeline.priced import transfer_bytes
from autopar.pipeline.stage_cut import StageCut
from autopar.pipeline.stage_work import Work
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled
from tests.support.models.language import ZOO
from tests.support.models.residual import interleaved_pipe, parallel_residual, piped, plain_pipe, tied_pipe


def zoo_pipe(name: str, num_microbatches: int = 4) -> ParallelModule:
    case = ZOO[name]()
    return compiled(case.model, {"pp": 2, "dp": 2}, case.batch, num_microbatches=num_microbatches)


PIPES: dict[str, Callable[[], ParallelModule]] = {
    "plain": plain_pipe,
    "interleaved": interleaved_pipe,
    "tied": tied_pipe,
    "one batch": lambda: piped(num_microbatches=1),
    "tied, one batch": partial(zoo_pipe, "gpt2", 1),
    **{name: partial(zoo_pipe, name) for name in ("gpt2", "t5", "bert", "albert")},
}
# The others show the same, and take their time.
CASES = [pytest.param(name, marks=pytest.mark.slow if name in ("t5", "bert", "tied, one batch") else ()) for name in PIPES]
TIED = ("tied", "tied, one batch", "gpt2", "t5", "bert", "albert")


@cache
def both(kind: str) -> tuple[Work, StageCut]:
    """What the GLOBAL program says by which a pipeline is priced, and the pieces of the LOCAL one that are run."""
    found = PIPES[kind]().compiled
    assert found.schedule.cut is not None
    return Work(found.program), found.schedule.cut


def origins(nodes: Iterable[Node]) -> set[str]:
    """The GLOBAL calls that LOCAL ones give the values of, but for reshards: these may end in a view, which whoever reads it makes."""
    return {ORIGIN[node] for node in nodes if node in ORIGIN and not ORIGIN[node].startswith("reshard")}


def lowered(nodes: Iterable[Node], cut: StageCut) -> set[str]:
    """The names of GLOBAL calls of which the LOCAL program has something: markers leave nothing."""
    left = origins(node for node in cut.program.graph.nodes if node.op == "call_function")
    return {node.name for node in nodes} & left


@pytest.mark.parametrize("kind", CASES)
def test_stages_compute_what_their_actions_do(kind: str) -> None:
    work, cut = both(kind)
    for stage in range(cut.num_stages):
        calls, waited = list(work.calls_at(stage)), work.waited_for(stage)
        backward = {node for node, phase in calls if phase == "backward"}
        forward = [node for node, phase in calls if phase == "forward"]
        # What is computed ahead is computed for every microbatch, too.
        assert lowered(forward, cut) == origins([*cut.actions[stage, "F"], *cut.ahead[stage]])
        assert lowered(backward & waited, cut) == origins(cut.actions[stage, "I"])
        assert lowered(backward - waited, cut) == origins(cut.actions[stage, "W"])


@pytest.mark.parametrize("kind", CASES)
def test_values_cross_where_they_are_sent_and_are_as_large(kind: str) -> None:
    work, cut = both(kind)
    sent = {ends: sum(node.meta["val"].nbytes for node in nodes) for ends, nodes in cut.transfers.items()}
    assert sent and transfer_bytes(work, CostModel(Cluster.ideal(), work.program.mesh)) == sent
    assert {ends: len(nodes) for ends, nodes in work.transfers.items()} == {ends: len(nodes) for ends, nodes in cut.transfers.items()}


@pytest.mark.parametrize("kind", CASES)
def test_what_runs_once_is_what_no_action_has(kind: str) -> None:
    work, cut = both(kind)
    inside = {node for nodes in (*cut.actions.values(), *cut.ahead.values()) for node in nodes}
    calls = {node for node in cut.program.graph.nodes if node.op == "call_function"}
    assert lowered(work.per_step, cut) == origins(calls - inside)


@pytest.mark.parametrize("kind", CASES)
def test_stages_exchange_the_sums_that_several_want(kind: str) -> None:
    work, cut = both(kind)
    exchanged = {(ORIGIN[tie.part], tie.source, tie.targets) for each in cut.sums for tie in each.ties}
    assert {(tie.part.name, tie.source, tie.targets) for tie in work.ties} == exchanged
    assert bool(exchanged) == (kind in TIED)


def test_what_runs_once_is_what_is_done_to_sums() -> None:
    compiled = plain_pipe().compiled
    work = Work(compiled.program)
    kinds = {output.kind for output, node in compiled.program.named_outputs() if node in work.per_step}
    assert kinds == {"gradient"} and all(work.runs(node) == 1 for node in work.per_step)
    saved = next(node for node in work.calls if node.name.startswith("save"))
    assert work.runs(saved) == 2


def test_gradients_of_two_stages_are_not_added_for_each_microbatch() -> None:
    work = Work(tied_pipe().compiled.program)
    (added,) = work.dropped
    assert {STAGE[each] for each in added.all_input_nodes} == {0, 1}


def test_a_program_without_stages_is_one() -> None:
    work = Work(parallel_residual().compiled.program)
    assert all(list(stages) == [0] for stages in work.stages.values())
    assert not work.per_step and not work.transfers
