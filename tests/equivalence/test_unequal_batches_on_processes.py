"""Batches of 7, 5 and 1 samples on processes: GPT-2 with ignored labels and dropout, and ResNet, whose batch norm takes the statistics of
true samples, are exact on two data-parallel ranks, on 2 × 2, and on a pipeline with four microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.captures import compiled
from tests.support.models import vision, zoo
from tests.support.ranks import GlooRanks

MODELS = {"gpt2": partial(zoo.gpt2, dropout=0.1), "resnet": vision.resnet}
MESHES = {"dp2": ((2,), ("dp",)), "dp2 tp2": ((2, 2), ("dp", "tp")), "pp2": ((2,), ("pp",))}


def share(values: dict[str, Tensor], sizes: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, Tensor]:
    """This rank's samples; of one sample the second rank has none."""
    if "dp" not in axes:
        return values
    place = dist.get_rank() // (sizes[1] if len(sizes) > 1 else 1)
    return {name: value.tensor_split(sizes[0])[place] for name, value in values.items()}


def worst_error(name: str, where: str, samples: int) -> tuple[str, float, int]:
    """What `verify` says of a step in training, of its loss and of every gradient, and the number of microbatches."""
    sizes, axes = MESHES[where]
    case = MODELS[name]()
    # Statistics of the whole batch allow one microbatch.
    options: dict[str, Any] = {"num_microbatches": 4} if "pp" in axes and name != "resnet" else {}
    mine = share({key: value[:samples] for key, value in case.batch.items()}, sizes, axes)
    parallel = compiled(case.model, init_device_mesh("cpu", sizes, mesh_dim_names=axes), mine, timeout=180, **options)
    parallel(**mine).loss.backward()
    report = parallel.verify(promote=True, **mine)
    return "" if report else str(report), report.worst, parallel.compiled.local.mesh.num_microbatches


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks(2)
    yield ranks
    ranks.stop()


CASES = [(name, where, samples) for where in MESHES for name in MODELS for samples in (7, 5, 1)]


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("name", "where", "samples"), CASES)
def test_training_is_exact(request: pytest.FixtureRequest, name: str, where: str, samples: int) -> None:
    sizes, _ = MESHES[where]
    ranks: GlooRanks = request.getfixturevalue("gloo_ranks" if len(sizes) == 2 else "two_ranks")
    for wrong, worst, number in ranks.run(worst_error, name, where, samples):
        assert not wrong and worst <= 1e-9, wrong
        # One sample is computed whole.
        assert number == (4 if where == "pp2" and name == "gpt2" and samples > 1 else 1)
