"""Updates within a step: each microbatch computes with one version of the weights, sums are those of one update, and it is proved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.checks.checker import check_schedule_program
from autopar.checks.versions import staleness_of
from autopar.cost.schedule_memory import peak_bytes
from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Launch, Run, Update
from autopar.ir.schedule import Versions
from autopar.pipeline.schedule_program import ScheduleProgram
from tests.support.captures import compiled


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def written(kind: str = "stash", dp: int = 1) -> ScheduleProgram:
    step = autopar.TrainStep(weight_versions=kind)  # type: ignore[arg-type]
    axes, x = {"pp": 2} | ({"dp": 2} if dp == 2 else {}), torch.randn(16, 4)
    parallel = compiled(Line(), axes, (x,), optimizer=torch.optim.SGD, num_microbatches=4, train_step=step)
    assert parallel.compiled.updating is not None
    return parallel.compiled.updating


def test_the_first_stage_keeps_a_version_for_what_is_under_way() -> None:
    first, last = written().places
    assert (first.versions, last.versions) == (Versions(4, 1), Versions(4, 0))
    assert (staleness_of(first), staleness_of(last)) == (1, 0)
    updates = [each for each in first.instructions if isinstance(each, Update)]
    assert len(updates) == 4 and [len(each.versions) for each in updates] == [3, 3, 0, 0], "0F2 and 0F3 take versions 1 and 2"
    weight = updates[0].parameters[0]
    took = {
        span.action: {name for each in first.instructions[span.begin : span.end] if isinstance(each, Run) for name in each.inputs}
        for span in first.spans
    }
    versions = {action: [name for name in sorted(names) if name.startswith(f"{weight}.v")] for action, names in took.items()}
    assert [versions[f"0F{number}"] for number in range(4)] == [[f"{weight}.v{each}"] for each in (0, 0, 1, 2)]
    assert not any(weight in names for names in took.values()), "nobody computes with what is updated in place"


def test_each_update_has_a_reduction_of_its_own() -> None:
    for schedule, matrices in zip(written("2bw", dp=2).places, (3, 1), strict=True):
        reduced = [each for each in schedule.instructions if isinstance(each, Launch) and each.collective == "all_reduce"]
        gradients = [each for each in reduced if any(".u" in name for name in each.sources)]
        assert sum(len(each.sources) for each in gradients) == matrices * schedule.versions.num_updates
        assert schedule.versions == Versions(2, 1)
        assert {each.target for each in schedule.instructions if isinstance(each, Add) and ".u" in each.target}


def test_two_versions_take_their_bytes() -> None:
    plain = compiled(Line(), {"pp": 2}, (torch.randn(16, 4),), optimizer=torch.optim.SGD, num_microbatches=4).compiled.updating
    assert plain is not None
    weights = 3 * 4 * 4 * 4  # of a stage: those that are updated, and three versions of them at most
    assert 0 < peak_bytes(written().places[0]) - peak_bytes(plain.places[0]) <= 3 * weights


def test_a_backward_with_another_version_is_refused() -> None:
    program = written()
    first = program.places[0]
    span = next(each for each in first.spans if each.action == "0B1")
    groups = []
    for position, each in enumerate(first.instructions):
        is_of_it = span.begin <= position < span.end and isinstance(each, Run)
        groups.append([replace(each, inputs=tuple(name.replace(".v0", ".v1") for name in each.inputs)) if is_of_it else each])
    with pytest.raises(ScheduleError, match="microbatch 1 computes with two versions of"):
        check_schedule_program(program.with_places([first.regrouped(groups), *program.places[1:]]))
