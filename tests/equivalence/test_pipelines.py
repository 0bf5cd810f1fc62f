"""The promise in pipelines: loss and gradients are the original's, whatever the order, the stages and the microbatches.

Every model × schedule × mesh × number of microbatches, on virtual ranks, in float64; ranks hold their own stages only.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.pipeline.schedules import GENERATORS
from tests.support.models.pipelined import MESHES, MODELS, TIES, UNet, assert_split, in_stages, microbatches, sized, unet
from tests.support.models.vision import resnet
from tests.support.models.zoo import IGNORED, Batch, Case

NUMBERS = (1, 4, 7)
# Shares of 28 over dp = 2: 1, 4 and 7 divide them.
WHOLE_BATCH = 56
# Each model but ResNet and the U-Net, which the batch norm below is about, and each schedule, mesh and number is there.
QUICK = {
    ("gpt2", "gpipe", "pp2", 4),
    ("llama", "1f1b", "pp2×dp2×tp2", 4),
    ("llama", "zb-h2", "pp2", 1),
    ("bert", "interleaved", "pp2", 7),
    ("bert", "zb-h1", "pp4", 4),
    ("t5", "zb-v", "pp2", 4),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(map(str, case)))
    for case in product(MODELS, GENERATORS, MESHES, NUMBERS)
]


def prepared(name: str, size: int) -> Case:
    """In evaluation mode, where batch norm is one function of one sample; the others have no dropout."""
    torch.manual_seed(0)
    case = MODELS[name]()
    return Case(case.model.eval(), sized(case.batch, size))


@pytest.mark.parametrize(("name", "schedule", "mesh", "number"), CASES)
def test_loss_and_gradients_are_the_originals(name: str, schedule: str, mesh: str, number: int) -> None:
    is_quick = (name, schedule, mesh, number) in QUICK
    size = 2 * MESHES[mesh].get("dp", 1) * max(number, 4) if is_quick else WHOLE_BATCH
    case = prepared(name, size)
    parallel = in_stages(case, MESHES[mesh], number, schedule)
    report = parallel.verify(promote=True, **case.batch)
    assert report and report.worst <= 1e-9 and report.reference == "original model", str(report)
    assert set(report.gradient_errors) == dict(parallel.named_parameters()).keys()
    assert_split(parallel, TIES.get(name, ()))


class Narrow(nn.Module):
    """Little for Inductor to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean()}


def test_by_the_default_backend() -> None:
    """A model of transformers' is in `test_backends.py`, which CI runs whole."""
    torch.manual_seed(0)
    case = Case(Narrow(), {"x": torch.randn(8, 4)})
    parallel = in_stages(case, {"pp": 2, "tp": 2}, 2, backend="inductor")
    report = parallel.verify(**case.batch)
    assert report and report.worst <= 1e-5 and report.reference == "original model", str(report)
    assert_split(parallel)


# ---- batch norm in training, where it is accepted that each microbatch has statistics of its own, over all of dp, and hands its
# buffers to the next


def logits_of(model: nn.Module, pixel_values: Tensor) -> Tensor:
    return model.logits(pixel_values) if isinstance(model, UNet) else model(pixel_values=pixel_values).logits


def stepped(model: nn.Module, batch: Batch, num_shares: int, number: int) -> Tensor:
    """The loss and, on `model`, gradients and buffers: microbatches one after another, one mean over all labels."""
    count = (batch["labels"] != IGNORED).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for each in microbatches(batch, num_shares, number):
        part = F.cross_entropy(logits_of(model, each["pixel_values"]), each["labels"], reduction="sum") / count
        part.backward()
        loss += part.detach()
    return loss


NORMALISED = [
    pytest.param(*case, marks=() if case == ("unet", "zb-v", "pp2", 4) else pytest.mark.slow)
    for case in product(("unet", "resnet"), GENERATORS, MESHES, (2, 4, 7))
]


@pytest.mark.parametrize(("name", "schedule", "mesh", "number"), NORMALISED)
def test_batch_norm_in_training_is_that_of_each_microbatch(name: str, schedule: str, mesh: str, number: int) -> None:
    torch.manual_seed(0)
    num_shares = MESHES[mesh].get("dp", 1)
    case = unet() if name == "unet" else resnet()
    case = Case(case.model, sized(case.batch, 2 * number * num_shares))
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, MESHES[mesh], number, schedule, microbatch_statistics="own")
    loss = parallel(**case.batch)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), stepped(reference, case.batch, num_shares, number), rtol=1e-9, atol=0)
    for (key, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=key)
    torch.testing.assert_close(dict(case.model.named_buffers()), dict(reference.named_buffers()), rtol=1e-9, atol=1e-12)
    report = parallel.verify(promote=True, **case.batch)
    assert not report and report.loss_error > 1e-9 and report.first_difference is None, "another computation than the original"
    assert report.own_statistics_error is not None and report.own_statistics_error <= 1e-9, str(report)
    assert_split(parallel)
