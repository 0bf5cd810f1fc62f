"""Models to run in pipelines, with batches of any size, and what must hold of a program that is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import ParallelModule
from tests.support.captures import compiled
from tests.support.models import language, vision, zoo
from tests.support.models.zoo import IGNORED, Batch, Case

CLASSES = 4
SYMBOLS, WIDTH = 12, 8
# The parameters that ops far apart read: two stages hold them.
TIES = {"gpt2": {"transformer.wte.weight"}, "bert": {"bert.embeddings.word_embeddings.weight"}, "t5": {"shared.weight"}}
MESHES: dict[str, dict[str, int]] = {"pp2": {"pp": 2}, "pp4": {"pp": 4}, "pp2×dp2×tp2": {"pp": 2, "dp": 2, "tp": 2}}


class Block(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class UNet(nn.Module):
    """Two levels down and up again: what the first stages make, the last ones read. One label a pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fine, self.coarse, self.deep = Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width)
        self.to_coarse, self.to_fine = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), nn.Upsample(scale_factor=2)
        self.join_coarse, self.join_fine = Block(4 * width, 2 * width), Block(3 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def logits(self, pixel_values: Tensor) -> Tensor:
        """[n, 3, h, w] → [n, CLASSES, h, w]; h and w are multiples of 4."""
        fine = self.fine(pixel_values)
        coarse = self.coarse(F.max_pool2d(fine, 2))
        deep = self.deep(F.max_pool2d(coarse, 2))
        joined = self.join_coarse(torch.cat([self.to_coarse(deep), coarse], 1))
        return self.head(self.join_fine(torch.cat([self.to_fine(joined), fine], 1)))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(pixel_values), labels)


def unet() -> Case:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (zoo.BATCH, 8, 8), generator=draw)
    labels[3], labels[5:, :4] = IGNORED, IGNORED
    return zoo.case(UNet(), {"pixel_values": torch.randn(zoo.BATCH, 3, 8, 8, generator=draw), "labels": labels})


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": zoo.gpt2,
    "llama": zoo.llama,
    "bert": zoo.bert,
    "t5": language.t5,
    "resnet": vision.resnet,
    "unet": unet,
}


class Tagger(nn.Module):
    """One embedding for what comes in and what goes out, so that the first stage and the last one hold it; three layers between."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.symbols(ids)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        logits = F.linear(x, self.symbols.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger(dropout: float = 0.0, size: int = 8) -> Case:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, SYMBOLS, (2, size, 4))
    return Case(Tagger(dropout).double(), {"ids": ids, "labels": labels})


def sized(batch: Batch, size: int) -> Batch:
    """`size` samples: those of `batch`, again and again, so that labels are ignored in unequal numbers."""
    return {name: value.repeat(-(-size // len(value)), *[1] * (value.ndim - 1))[:size] for name, value in batch.items()}


def in_stages(case: Case, axes: dict[str, int], number: int | None, schedule: Any = "1f1b", **options: Any) -> ParallelModule:
    return compiled(case.model, axes, case.batch, num_microbatches=number, schedule=schedule, **options)


def parameters_of(parallel: ParallelModule) -> list[set[str]]:
    """The names of the parameters that each rank along `pp` holds."""
    return [{item.name for item in each.signature.inputs_of("parameter")} for each in parallel.compiled.schedules]


def assert_split(parallel: ParallelModule, ties: Collection[str] = ()) -> None:
    """Ranks run different programs, and each holds the parameters of its own stages: none twice but `ties`, none nowhere."""
    texts = [str(schedule) for schedule in parallel.compiled.schedules]
    assert len(set(texts)) == len(texts) == parallel.mesh.size_of(parallel.mesh.parts("pp"))
    held = parameters_of(parallel)
    assert set().union(*held) == dict(parallel.named_parameters()).keys()
    twice = {name for name in set().union(*held) if sum(name in names for names in held) > 1}
    assert twice <= set(ties), f"{twice - set(ties)} are held by several stages"


def microbatches(batch: Batch, num_shares: int, number: int) -> Iterator[Batch]:
    """Slice j of every one of `num_shares` shares of the batch along dp, for each j."""
    for j in range(number):
        yield {name: torch.cat([share.chunk(number)[j] for share in value.chunk(num_shares)]) for name, value in batch.items()}
