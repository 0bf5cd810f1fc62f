"""A vocabulary split over ranks, of any size: the loss and its gradients are the original's, and no rank holds all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Cluster
from autopar.ir.keys import SHARDING
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.projected_cross_entropy import projected_cross_entropy

IGNORED = -100
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "smooth": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1), y, reduction="sum"),
}


class Model(nn.Module):
    def __init__(self, num_classes: int, loss: str, width: int = 16) -> None:
        super().__init__()
        self.symbols = nn.Embedding(num_classes, width)
        self.head = nn.Linear(width, num_classes, bias=False)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[self.loss](self.head(torch.tanh(self.symbols(ids))), labels)


def assert_exact(num_classes: int, loss: str, mesh: dict[str, int], **options: object) -> autopar.ParallelModule:
    torch.manual_seed(0)
    model = Model(num_classes, loss).double()
    ids, labels = torch.randint(0, num_classes, (2, 48))
    labels[::5] = IGNORED
    batch = {"ids": ids, "labels": labels}
    parallel = autopar.compile(
        model,
        autopar.virtual_mesh(**mesh),
        example_inputs=batch,
        backend="eager",
        **{"cluster": Cluster.ideal()} | options,  # type: ignore[arg-type]
    )
    loss_value, wanted = parallel(**batch), model(**batch)
    loss_value.backward()
    wanted.backward()
    torch.testing.assert_close(loss_value, wanted, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-13)
    return parallel


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("num_classes", "mesh"), [(12, {"tp": 2}), (11, {"tp": 2}), (30, {"dp": 2, "tp": 4}), (29, {"tp": 4})], ids=str)
def test_logits_stay_split(num_classes: int, mesh: dict[str, int], loss: str) -> None:
    parallel = assert_exact(num_classes, loss, mesh, pins={"head.weight": ("tp", None)} if num_classes % mesh["tp"] == 0 else None)
    (node,) = (node for node in parallel.compiled.program.graph.nodes if node.target is cross_entropy)
    if num_classes % mesh["tp"] == 0:
        assert ("tp", "logsumexp") in SHARDING[node][0].unreduced


def test_logits_in_chunks() -> None:
    """Where they are whole on each rank: split over it they take less than what chunks need besides."""
    parallel = assert_exact(501, "mean", {"tp": 2}, memory_budget=4.7e5)
    assert any(node.target is projected_cross_entropy for node in parallel.compiled.program.graph.nodes)
