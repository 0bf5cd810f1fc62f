"""What the runtime takes beside what fragments compute: of a module that computes as before afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.verify.host_seconds import RecordedFragments, RuntimeSeconds, Timer, runtime_seconds, update_seconds
from tests.support.captures import compiled

BATCH = {"x": torch.ones(4, 8)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def parallel() -> ParallelModule:
    return compiled(Net(), {"dp": 2}, BATCH)


def test_fragments_give_back_what_they_gave_and_run_nothing(parallel: ParallelModule) -> None:
    _, captured = parallel.captured((), BATCH)
    fragments, ran = captured.fragments, list[str]()
    real_run = fragments.run

    class Counted(RecordedFragments):
        def run(self, name: str, inputs: Sequence[torch.Tensor], into: object = None) -> tuple[torch.Tensor, ...]:
            ran.append(name)
            return super().run(name, inputs)

    calls: list[str] = []
    fragments.run = lambda name, *rest: calls.append(name) or real_run(name, *rest)  # pyright: ignore[reportAttributeAccessIssue]
    recorded = captured.fragments = Counted(fragments)
    try:
        first = parallel(**BATCH)
        first.backward()
        number = len(calls)
        recorded.rewind()
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.zero_()
        again = parallel(**BATCH)
        again.backward()
    finally:
        captured.fragments = fragments
        del fragments.run
    assert number > 0 and len(calls) == number and len(ran) == 2 * number
    assert float(again) == float(first) > 0, "of parameters that are zero by now"


def test_what_is_measured_is_the_parts_of_a_step_and_the_module_is_left_as_it_was() -> None:
    mine = compiled(Net(), {"dp": 2}, BATCH)
    before = float(mine(**BATCH))
    found = runtime_seconds(mine, dict(BATCH), repeats=3)
    assert found.num_parameters == 8 and found.num_instructions == len(mine.compiled.schedule_of(0).instructions)
    assert found.step > found.instructions > 0 and found.step > found.guard > 0
    assert float(mine(**BATCH)) == before and all(parameter.grad is None for parameter in mine.parameters())
    assert 0 <= update_seconds(mine, repeats=3) < 1e-2


def test_a_parameter_has_its_share_of_what_is_beside_instructions() -> None:
    found = RuntimeSeconds(step=10.0, instructions=4.0, guard=1.0, num_instructions=8, num_parameters=3)
    assert (found.instruction_seconds, found.parameter_seconds) == (0.5, 2.0)


def test_a_timer_counts_what_its_thread_computes_and_not_what_it_sleeps() -> None:
    timer = Timer(lambda: sum(range(200_000)))
    timer()
    once = timer.taken()
    timer()
    timer()
    assert once > 0 and timer.taken() > 1.2 * once and timer.taken() == 0.0
