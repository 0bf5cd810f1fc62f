"""The promise: on any mesh the compiled model computes the loss and every gradient of the original on the global batch.

Planned on the ideal cluster, where links are free, so that all that can be split is: replicating everything would be
exact and worthless. With dropout the original draws other numbers, and the FORWARD program on one device is compared with.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar import ParallelModule
from tests.support.captures import compiled
from tests.support.models.zoo import ZOO, Batch

MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2×tp2": {"dp": 2, "tp": 2},
    "dp2×tp4": {"dp": 2, "tp": 4},
}
DROPOUTS = {"dropout off": 0.0, "dropout on": 0.1}
QUICK = {(name, "dp2×tp2", "dropout off") for name in ("llama", "bert", "vit")} | {("gpt2", "dp2×tp4", "dropout on")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in product(ZOO, MESHES, DROPOUTS)
]


def parallel_of(name: str, mesh: str, dropout: float, num_layers: int = 1) -> tuple[ParallelModule, Batch]:
    """A float32 model, as users have them."""
    case = ZOO[name](num_layers, dropout).to(torch.float32)
    return compiled(case.model, MESHES[mesh], case.batch), case.batch


@pytest.mark.parametrize(("name", "mesh", "dropout"), CASES)
def test_loss_and_gradients_are_the_originals(name: str, mesh: str, dropout: str) -> None:
    parallel, batch = parallel_of(name, mesh, DROPOUTS[dropout], num_layers=1 if (name, mesh, dropout) in QUICK else 2)
    trained = {key for key, parameter in parallel.named_parameters() if parameter.requires_grad}
    for promote, tolerance in ((True, 1e-9), (False, 1e-4)):
        report = parallel.verify(promote=promote, **batch)
        assert report and report.worst <= tolerance, str(report)
        assert report.reference == ("forward program" if DROPOUTS[dropout] else "original model")
        assert set(report.gradient_errors) == trained
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()


@pytest.mark.slow
def test_dropout_in_evaluation_is_the_original() -> None:
    parallel, batch = parallel_of("bert", "dp2×tp2", 0.1)
    parallel.eval()
    report = parallel.verify(promote=True, **batch)
    assert report and report.reference == "original model", str(report)


def test_a_step_draws_what_no_other_step_draws() -> None:
    parallel, batch = parallel_of("gpt2", "dp2", 0.5)
    losses = [float(parallel(**batch).loss.detach()) for _ in range(3)]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_the_mesh_does_not_change_what_is_drawn() -> None:
    found = []
    for mesh in ("dp2", "tp2"):
        torch.manual_seed(3)
        parallel, batch = parallel_of("gpt2", mesh, 0.5)
        found.append([float(parallel(**batch).loss.detach()) for _ in range(2)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
