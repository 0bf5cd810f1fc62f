"""Where a value that is not finite first appears: the node with its line, the rank, the microbatch, whatever comes of it afterwards."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import NonFiniteError
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share

WIDTH, SAMPLES = 8, 8
SGD = (torch.optim.SGD, {"lr": 1e-3})


class Layer(nn.Module):
    """A layer that attends to what is not masked, and `breaks` where a sample's mark is not zero."""

    def __init__(self, breaks: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), breaks

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        h = torch.tanh(self.up(scores.softmax(-1) @ x))
        h = h if self.breaks is None else self.breaks(h, mark[:, None, None])
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, broken: int, breaks: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(breaks if number == broken else None) for number in range(4))

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mark)
        return (x - x.mean(-1, keepdim=True)).square().mean()


def overflows(h: Tensor, mark: Tensor) -> Tensor:
    return h + torch.exp(1000.0 * mark * h.square())  # here


def divides(h: Tensor, mark: Tensor) -> Tensor:
    return h + torch.where(mark > 0, mark - mark, torch.ones_like(mark)).log() * 0.0  # here


def breaks_backward(h: Tensor, mark: Tensor) -> Tensor:
    return h + (h * (1 - mark)).square().sqrt() * 0.1  # here


def line_of(function: Callable[..., Any]) -> str:
    lines, begin = inspect.getsourcelines(function)
    return f"{Path(__file__).name}:{begin + next(number for number, line in enumerate(lines) if '# here' in line)}"


def batch(marked: int | None = None) -> dict[str, Tensor]:
    found = {"x": torch.randn(SAMPLES, 4, WIDTH, generator=torch.Generator().manual_seed(0)), "mark": torch.zeros(SAMPLES)}
    if marked is not None:
        found["mark"][marked] = 1.0
    return found


def refusal(axes: dict[str, int], broken: int, breaks: Callable[[Tensor, Tensor], Tensor], marked: int, **options: Any) -> str:
    torch.manual_seed(0)
    parallel = compiled(Model(broken, breaks), axes, batch(), optimizer=SGD, **options)
    parallel.train_step(**batch())
    with pytest.raises(NonFiniteError) as caught:
        parallel.train_step(**batch(marked))
    return str(caught.value)


RAISES = autopar.TrainStep(non_finite="raise")


@pytest.mark.parametrize(
    ("breaks", "what"),
    [
        (overflows, "The first infinity in the forward is %exp"),
        (divides, "The first infinity in the forward is %log"),
        (breaks_backward, " in the backward is %"),
    ],
)
def test_the_node_and_its_line_are_named(breaks: Callable[[Tensor, Tensor], Tensor], what: str) -> None:
    text = refusal({"dp": 2, "tp": 2}, 2, breaks, 5, train_step=RAISES)
    assert what in text and line_of(breaks) in text and "layers.2" in text, text
    # Sample 5 is in the second share of dp; how tp splits the layer says which of its two ranks, or both.
    assert re.search(r"on (rank [23] \(dp 1, tp [01]\)|ranks 2, 3)", text), text
    assert ("the loss is infinite or NaN" in text) == (breaks is not breaks_backward)


def test_the_stage_and_the_microbatch_are_named() -> None:
    for broken, marked in ((0, 5), (3, 2)):
        text = refusal({"pp": 2}, broken, overflows, marked, train_step=RAISES, num_microbatches=4)
        assert f"on rank {broken // 2} (pp {broken // 2}), microbatch {marked // 2}" in text and line_of(overflows) in text, text


def test_a_row_that_is_masked_wholly_is_where_it_becomes_nan() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mark: Tensor) -> Tensor:
            scores = self.first(x).masked_fill(mark[:, None, None] > 0, -torch.inf)
            return scores.softmax(-1).square().mean()

    parallel = compiled(Masked(), {"dp": 2}, batch(), optimizer=SGD, train_step=RAISES)
    with pytest.raises(NonFiniteError, match=r"The first NaN in the forward is %.*on rank 1 \(dp 1\)"):
        parallel.train_step(**batch(6))


def test_what_the_call_brings_is_said() -> None:
    torch.manual_seed(0)
    network = Model(0, lambda h, mark: h)
    parallel = compiled(network, {"dp": 2}, batch(), optimizer=SGD, train_step=RAISES)
    bad = batch()
    bad["x"][3, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="The call's batch 'x' has a NaN from the start"):
        parallel.train_step(**bad)
    network.layers[1].up.weight.data[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="The call's parameter 'layers.1.up.weight' has an infinity from the start"):
        parallel.train_step(**batch())


def test_of_calls_that_accumulate_the_one_is_found() -> None:
    torch.manual_seed(0)
    options = autopar.TrainStep(non_finite="raise", accumulate=3)
    parallel = compiled(Model(1, overflows), {"dp": 2}, batch(), optimizer=SGD, train_step=options)
    for marked in (None, 6):
        parallel.train_step(**batch(marked))
    with pytest.raises(NonFiniteError, match=r"%exp.*on rank 1 \(dp 1\)"):
        parallel.train_step(**batch())
    for _ in range(3):
        parallel.train_step(**batch())  # the next cycle is clean


def test_steps_that_are_skipped_are_told_with_their_place_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    parallel = compiled(Model(1, overflows), {"dp": 2}, batch(), optimizer=SGD, train_step=autopar.TrainStep(non_finite="skip"))
    for marked in (6, 6, None):
        parallel.train_step(**batch(marked))
    told = [each.getMessage() for each in caplog.records if "a step is skipped" in each.getMessage()]
    assert len(told) == 2 and "The first infinity" in told[0] and "The first" not in told[1]


def on_a_rank(shape: tuple[int, ...], axes: tuple[str, ...]) -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    more = {"num_microbatches": 2} if "pp" in axes else {}
    parallel = compiled(Model(3, overflows), mesh, share(batch(), mesh), optimizer=SGD, train_step=RAISES, timeout=180, **more)
    try:
        parallel.train_step(**share(batch(5), mesh))
    except NonFiniteError as error:
        return str(error)
    return "nothing"


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("shape", "axes"), [((2, 2), ("dp", "tp")), ((2, 2), ("pp", "dp"))], ids=["dp2×tp2", "pp2×dp2"])
def test_all_processes_raise_the_same(gloo_ranks: GlooRanks, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    found = gloo_ranks.run(on_a_rank, shape, axes)
    assert len(set(found)) == 1 and "%exp" in found[0] and line_of(overflows) in found[0], found
    assert re.search(r"on rank 3 \(pp 1, dp 1\), microbatch 0" if "pp" in axes else r"on (rank [23] \(dp 1|ranks 2, 3)", found[0]), found
