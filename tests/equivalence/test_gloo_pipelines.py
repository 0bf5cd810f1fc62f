"""Pipelines on real ranks, over gloo: loss, gradients, training and state are those of plain torch on the global batch.

Each process holds the parameters of its stage alone, as DTensors over the other axes, and feeds its share along dp.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import ParallelModule
from autopar.runtime.verify.report import error_of
from tests.support.captures import compiled
from tests.support.models.pipelined import UNet, tagger
from tests.support.models.zoo import Batch, gpt2
from tests.support.ranks import GlooRanks, share

TIMEOUT = 180

# The loss of a float64 transformer is computed in float32.
TOLERANCE = 1e-5
MODELS = {"tagger": tagger, "gpt2": gpt2}
TIED = {"symbols.weight", "transformer.wte.weight"}


# ---- on the ranks


def trains(name: str, axes: dict[str, int], number: int, schedule: str) -> dict[str, Any]:
    """A clipped step of AdamW, the state after it, loaded again and from plain torch; evaluation; a batch of another shape."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    case = MODELS[name]()
    reference, batch = copy.deepcopy(case.model), case.batch
    mine = share(batch, mesh)
    parallel = compiled(case.model, mesh, num_microbatches=number, schedule=schedule, timeout=TIMEOUT)
    loss, wanted = parallel(**mine)["loss"], reference(**batch)["loss"]
    (2 * loss).backward()
    (2 * wanted).backward()
    found = {"loss": abs(float(loss.detach() - wanted.detach()))}
    held = dict(parallel.named_parameters())
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    floor = 1e-6 * float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for name, parameter in held.items():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        found[f"gradient of {name}"] = error_of(parameter.grad.full_tensor(), gradients[name], floor)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (parallel, reference)]
    norm, bound = parallel.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert bound > 0.5, "clipping must bite"
    found["norm"] = abs(float(norm - bound))
    for optimizer in optimizers:
        optimizer.step()
    found |= state_errors(parallel, reference)
    report = parallel.verify(promote=True, **mine)
    found["loss in evaluation"] = in_evaluation(parallel, reference, mine, batch)
    short, shorter = ({name: value[:, :3] for name, value in each.items()} for each in (mine, batch))
    found["loss of a shorter batch"] = abs(float((parallel.train()(**short)["loss"] - reference.train()(**shorter)["loss"]).detach()))
    return {"errors": found, "verified": (bool(report), report.worst), "names": set(held), "number of parameters": len(gradients)}


def state_errors(parallel: ParallelModule, reference: nn.Module) -> dict[str, float]:
    """Whole state after training; the sharded state and that of plain torch, loaded again."""
    wanted = reference.state_dict()
    full = parallel.full_state_dict()
    assert list(full) == list(wanted)
    found = {"full state": difference(full, wanted)}
    sharded = {name: value.clone() for name, value in parallel.state_dict().items()}
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    parallel.load_state_dict(sharded, strict=False)
    found["sharded state loaded again"] = difference(parallel.full_state_dict(), wanted)
    parallel.load_state_dict(wanted)
    return found | {"plain state loaded": difference(parallel.full_state_dict(), wanted)}


def in_evaluation(parallel: ParallelModule, reference: nn.Module, mine: Batch, batch: Batch) -> float:
    parallel.eval()
    reference.eval()
    with torch.no_grad():
        return abs(float(parallel(**mine)["loss"] - reference(**batch)["loss"]))


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def normalises() -> float:
    """Running statistics of all stages, on every rank, after two microbatches."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model = UNet().double()
    reference = copy.deepcopy(model)
    images, labels = torch.randn(4, 3, 8, 8).double(), torch.randint(0, 4, (4, 8, 8))
    parallel = compiled(model, mesh, num_microbatches=2, schedule="1f1b", timeout=TIMEOUT, microbatch_statistics="own")
    parallel(images, labels).backward()
    for each in images.chunk(2):
        reference.logits(each)
    return difference(parallel.full_state_dict(), reference.state_dict())


def normalises_as_one_device() -> tuple[int, bool, float]:
    """The number of microbatches that nobody asked for, whether `verify` agrees, and how far the buffers are from plain torch's."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = UNet().double()
    reference = copy.deepcopy(model)
    batch = {"pixel_values": torch.randn(8, 3, 8, 8).double(), "labels": torch.randint(0, 4, (8, 8, 8))}
    mine = share(batch, mesh)
    parallel = compiled(model, mesh, schedule="1f1b", timeout=TIMEOUT)
    parallel(**mine).backward()
    reference(**batch)
    report = parallel.verify(promote=True, **mine)
    number = parallel.compiled.local.mesh.num_microbatches
    return number, bool(report) and report.worst <= 1e-9, difference(parallel.full_state_dict(), reference.state_dict())


# ---- the tests


def assert_as_plain(found: list[dict[str, Any]], stages: dict[int, list[int]]) -> None:
    """`stages` has the ranks of each."""
    for each in found:
        assert max(each["errors"].values()) <= TOLERANCE, each["errors"]
        assert each["verified"][0] and each["verified"][1] <= 1e-9
    names = {stage: found[ranks[0]]["names"] for stage, ranks in stages.items()}
    for stage, ranks in stages.items():
        assert all(found[rank]["names"] == names[stage] for rank in ranks)
    assert names[0] & names[1] <= TIED and names[0] - names[1] and names[1] - names[0]
    assert all(each["number of parameters"] == len(names[0] | names[1]) for each in found)


def test_training_follows_plain_torch(gloo_ranks: Any) -> None:
    found = gloo_ranks.run(trains, "tagger", {"pp": 2, "dp": 2}, 2, "1f1b")
    assert_as_plain(found, {0: [0, 1], 1: [2, 3]})


def test_every_rank_has_the_buffers_of_all_stages(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(normalises)) <= 1e-12


def test_by_default_batch_norm_is_that_of_one_device_on_every_rank(gloo_ranks: Any) -> None:
    for number, agrees, error in gloo_ranks.run(normalises_as_one_device):
        assert number == 1 and agrees and error <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_training_on_three_axes_follows_plain_torch(schedule: str) -> None:
    ranks = GlooRanks(8)
    try:
        found = ranks.run(trains, "gpt2", {"pp": 2, "dp": 2, "tp": 2}, 4, schedule, timeout=600)
    finally:
        ranks.stop()
    assert_as_plain(found, {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]})
