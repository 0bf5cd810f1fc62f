"""What one process alone finds wrong is raised by all of them, the same text naming it: nobody waits, and once it is mended they go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.support.ranks import GlooRanks

WRONG = 1  # the rank
SECONDS = 60.0


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.refusing = -1

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except ValueError as error:  # as ours are, and torch's here
        return str(error)
    return ""


def small(optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(4, 8)
    step = autopar.TrainStep(loss_scale=autopar.LossScale(initial=8.0))
    cluster = autopar.Cluster.ideal()
    return autopar.compile(Small(), mesh, backend="eager", cluster=cluster, optimizer=optimizer, train_step=step, **options), x


@contextmanager
def leftover_gradient(parallel: Any) -> Iterator[None]:
    parameter = parallel.second.bias
    parameter.grad = torch.ones_like(parameter)
    yield
    parameter.grad = None


@contextmanager
def hook(parallel: Any) -> Iterator[None]:
    handle = parallel.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    yield
    handle.remove()


@contextmanager
def state_of_another_shape(parallel: Any) -> Iterator[None]:
    state = parallel.optimizer.state[parallel.first.weight]
    kept, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    yield
    state["exp_avg"] = kept


@contextmanager
def another_count(parallel: Any) -> Iterator[None]:
    parallel._trainer._num_calls += 1
    yield
    parallel._trainer._num_calls -= 1


FAULTS: list[tuple[Any, str]] = [
    (leftover_gradient, f"rank {WRONG}: 'second.bias', one of 1, has a gradient already"),
    (hook, f"rank {WRONG}: there is a hook on the gradient of 'second.bias'"),
    (state_of_another_shape, f"rank {WRONG}: the optimizer's state has 'exp_avg' of shape [3]"),
    (another_count, f"ranks 0 and {WRONG} make different calls"),
]


def each_fault() -> list[tuple[str, float]]:
    """By fault what this rank raises, and the loss of the step after it is mended."""
    parallel, x = small()
    found = []
    for fault, _ in FAULTS:
        parallel.train_step(x)
        with fault(parallel) if dist.get_rank() == WRONG else torch.enable_grad():
            text = refusal(lambda: parallel.train_step(x))
        found.append((text, float(parallel.train_step(x))))
    return found


def at_birth() -> list[str]:
    """What this rank raises where another cannot make its optimizer, load its state, capture the model."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([] if dist.get_rank() == WRONG else list(parameters), lr=0.1)

    parallel, x = small(made)
    found = [refusal(lambda: parallel.train_step(x))]
    parallel, x = small()
    parallel.train_step(x)
    state = parallel.train_state_dict()
    if dist.get_rank() == WRONG:
        state["loss_scale"] = None
    found.append(refusal(lambda: parallel.load_train_state_dict(state)))
    parallel, x = small()
    if dist.get_rank() == WRONG:
        parallel.first.forward = lambda x: x if float(x.sum()) > 0 else -x
    found.append(refusal(lambda: parallel.train_step(x)))
    return found


@pytest.mark.xdist_group("gloo")
def test_a_step_that_one_rank_refuses(gloo_ranks: GlooRanks) -> None:
    everyone = gloo_ranks.run(each_fault, timeout=SECONDS)
    for found in everyone:
        for (_, begin), (text, loss) in zip(FAULTS, found, strict=True):
            assert text.startswith(begin), text
            assert loss > 0
    assert len({tuple(found) for found in everyone}) == 1


@pytest.mark.xdist_group("gloo")
def test_what_one_rank_cannot_begin(gloo_ranks: GlooRanks) -> None:
    for made, loaded, captured in gloo_ranks.run(at_birth, timeout=SECONDS):
        assert "optimizer got an empty parameter list" in made and (f"rank {WRONG}: " in made or made.startswith("optimizer got")), made
        assert loaded.startswith(f"rank {WRONG}: the saved state of training does not fit: a loss scale is in the saved state not"), loaded
        assert captured.startswith(f"rank {WRONG}: "), captured


def asked_for_alone() -> list[str]:
    """What is raised where this rank's options, or the dtype that it computes with, are its own."""
    is_wrong = dist.get_rank() == WRONG
    parallel, x = small(zero=1 if is_wrong else None, num_microbatches=2 if is_wrong else 1)
    found = [refusal(lambda: parallel.train_step(x))]
    parallel, x = small()
    return [*found, refusal(lambda: parallel.train_step(x.double() if is_wrong else x))]


@pytest.mark.xdist_group("gloo")
def test_what_one_rank_asks_for_alone(gloo_ranks: GlooRanks) -> None:
    for options, dtype in gloo_ranks.run(asked_for_alone, timeout=SECONDS):
        assert options == (
            f"rank 0 has zero=None, num_microbatches=1, and rank {WRONG} has zero=1, num_microbatches=2: "
            "give autopar.compile the same on all ranks"
        )
        assert dtype == f"ranks 0 and {WRONG} pass 'args[0]' as torch.float32 and as torch.float64: all pass one dtype"
