"""The main job in bfloat16: after 200 steps of the training example its loss is float32's within a hundredth, and on processes all replicas
of every master are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_gpt
from options import parse
from text import Windows, read_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training import Example, make_optimizer, train

import autopar
from tests.support.ranks import GlooRanks, share

SIZES = "--layers 2 --width 128 --heads 4 --length 64 --batch 16 --sample 0 --backend eager"
STEPS = 200


def losses_of(mesh: str, *flags: str) -> list[float]:
    example = Example(title="a byte-level GPT", build_model=train_gpt.build_model, make_batch=train_gpt.make_batch)
    return [each.loss for each in train(example, [*SIZES.split(), "--steps", str(STEPS), "--mesh", mesh, *flags])]


def last(losses: list[float]) -> float:
    """The mean of the last ten: one batch is harder than another."""
    return sum(losses[-10:]) / 10


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2"])
def test_the_loss_is_that_of_float32_within_a_hundredth(mesh: str) -> None:
    exact, low = losses_of(mesh), losses_of(mesh, "--precision", "bf16")
    print(f"\n{mesh}: float32 {exact[0]:.4f} -> {last(exact):.4f}, bf16 {last(low):.4f}, off by {abs(last(low) / last(exact) - 1):.5f}")
    assert len(exact) == len(low) == STEPS and last(exact) < 0.7 * exact[0], "it learns"
    assert low != exact
    assert abs(last(low) - last(exact)) <= 0.01 * last(exact)
    assert abs(low[-1] - exact[-1]) <= 0.01 * exact[-1]


def trains_on_a_rank(sizes: tuple[int, ...], axes: tuple[str, ...]) -> tuple[list[float], list[str], int]:
    """The losses, the names of parameters of which this rank's replicas are not the same bits, and how many have replicas."""
    options = parse("the main job", [*SIZES.split(), "--precision", "bf16"])
    torch.manual_seed(options.seed)
    model, mesh = train_gpt.build_model(options), init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    windows = Windows(read_text(), options.batch, options.length + 1, options.seed)
    parallel = autopar.compile(
        model, mesh, backend="eager", cluster="cpu", precision="bf16", timeout=180,
        optimizer=lambda parameters: make_optimizer(parameters, options), train_step=autopar.TrainStep(clip_grad_norm=options.clip),
    )  # fmt: skip
    losses = [float(parallel.train_step(**share(train_gpt.make_batch(windows.draw()), mesh))) for _ in range(STEPS)]
    mine, everyone = parts_of(parallel), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert mine and all(local.dtype == torch.float32 for local in mine.values())
    same = [(key, torch.equal(mine[key], theirs[key])) for theirs in everyone if theirs is not mine for key in mine.keys() & theirs.keys()]
    return losses, [name for (name, _), is_same in same if not is_same], len({key for key, _ in same})


def parts_of(parallel: autopar.ParallelModule) -> dict[tuple[str, Any], torch.Tensor]:
    """What this rank holds of each parameter, by its name and by where along each axis that splits it."""
    found: dict[tuple[str, Any], torch.Tensor] = {}
    for name, each in parallel.named_parameters():
        assert isinstance(each, DTensor)
        where = each.device_mesh.get_coordinate()
        assert where is not None
        key = tuple((dim, at) for dim, (at, placed) in enumerate(zip(where, each.placements, strict=True)) if not placed.is_replicate())
        found[name, key] = each.detach().to_local()
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("sizes", "axes"), [((2, 2), ("dp", "tp")), ((2, 2), ("pp", "dp"))], ids=["dp2×tp2", "pp2×dp2"])
def test_masters_are_the_same_bits_on_all_replicas(gloo_ranks: GlooRanks, sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
    found = gloo_ranks.run(trains_on_a_rank, sizes, axes, timeout=600.0)
    for losses, unlike, number in found:
        assert losses == found[0][0] and last(losses) < 0.7 * losses[0]
        assert not unlike and number > 0
    print(f"\n{axes}: {found[0][0][0]:.4f} -> {last(found[0][0]):.4f}, {[number for *_, number in found]} parts compared with a replica's")
