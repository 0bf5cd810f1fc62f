"""Losses, layers and ops of torch, each at the sizes that it is asked for: what `tests/equivalence/test_sweep.py` runs.

A row makes (what is computed, its inputs); the first input goes through a Linear of its last dim before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    batch: int
    length: int
    width: int
    channels: int
    height: int
    classes: int

    def floats(self, dims: str, seed: int = 0) -> Tensor:
        """Normal numbers; a letter a dim."""
        return torch.randn(self.shape(dims), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def ids(self, dims: str, below: int, seed: int = 0) -> Tensor:
        return torch.randint(0, below, self.shape(dims), generator=torch.Generator().manual_seed(seed))

    def signs(self, dims: str) -> Tensor:
        return self.ids(dims, 2) * 2 - 1

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(
            {"b": self.batch, "s": self.length, "d": self.width, "c": self.channels, "h": self.height, "k": self.classes}[x] for x in dims
        )


EQUAL, DIFFERENT = Sizes(8, 8, 8, 8, 8, 8), Sizes(4, 6, 10, 16, 12, 14)

Computed = Callable[..., object]
Row = Callable[[Sizes], tuple[Computed, list[Tensor]]]


def of(compute: Callable[..., object], dims: str = "bsd") -> Row:
    """An op on one tensor."""
    return lambda z: (compute, [z.floats(dims)])


def pair(compute: Callable[..., object], dims: str = "bd", others: str = "") -> Row:
    """An op on two tensors."""
    return lambda z: (compute, [z.floats(dims), z.floats(others or dims, 1)])


def _layer(make: Callable[[Sizes], nn.Module], dims: str) -> Row:
    return lambda z: (make(z), [z.floats(dims)])


def _labelled(loss: Callable[..., object], x: str = "bk", labels: str = "b") -> Row:
    """A loss of scores over classes, which are moved to where torch wants them, and labels."""
    return lambda z: (lambda y, t: loss(y.movedim(-1, 1), t), [z.floats(x), z.ids(labels, z.classes)])


def _ignoring(z: Sizes) -> tuple[Computed, list[Tensor]]:
    labels = z.ids("b", z.classes)
    labels[0] = -100
    return F.cross_entropy, [z.floats("bk"), labels]


def _weighted(loss: Callable[..., object], log: bool = False) -> Row:
    def make(z: Sizes) -> tuple[Computed, list[Tensor]]:
        weight = z.floats("k", 3).abs()
        return (lambda y, t: loss(y.log_softmax(-1) if log else y, t, weight=weight)), [z.floats("bk"), z.ids("b", z.classes)]

    return make


def _ctc(z: Sizes) -> tuple[Computed, list[Tensor]]:
    lengths = torch.full((z.batch,), z.length), torch.full((z.batch,), 3)
    labels = z.ids("bs", z.classes - 1)[:, :3] + 1
    return lambda y, t: F.ctc_loss(y.log_softmax(-1).transpose(0, 1), t, *lengths), [z.floats("bsk"), labels]


LOSSES: dict[str, Row] = {
    "L1": pair(F.l1_loss),
    "L1, sum": pair(lambda a, b: F.l1_loss(a, b, reduction="sum")),
    "MSE": pair(F.mse_loss),
    "MSE of sequences, sum": pair(lambda a, b: F.mse_loss(a, b, reduction="sum"), "bsd"),
    "MSE, one by one": pair(lambda a, b: F.mse_loss(a, b, reduction="none")),
    "Huber": pair(lambda a, b: F.huber_loss(a, b, delta=0.5)),
    "smooth L1": pair(lambda a, b: F.smooth_l1_loss(a, b, beta=0.3)),
    "cross entropy": _labelled(F.cross_entropy),
    "cross entropy, sum": _labelled(lambda y, t: F.cross_entropy(y, t, reduction="sum")),
    "cross entropy, one by one": _labelled(lambda y, t: F.cross_entropy(y, t, reduction="none")),
    "cross entropy of sequences": _labelled(F.cross_entropy, "bsk", "bs"),
    "cross entropy of images": _labelled(F.cross_entropy, "bshk", "bsh"),
    "cross entropy, smoothed": _labelled(lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1)),
    "cross entropy, ignoring": _ignoring,
    "cross entropy, weighted": _weighted(F.cross_entropy),
    "cross entropy, weighted and smoothed": _weighted(lambda y, t, weight: F.cross_entropy(y, t, weight=weight, label_smoothing=0.1)),
    "cross entropy with probabilities": lambda z: (F.cross_entropy, [z.floats("bk"), z.floats("bk", 1).softmax(-1)]),
    "NLL": _labelled(lambda y, t: F.nll_loss(y.log_softmax(1), t)),
    "NLL of images": _labelled(lambda y, t: F.nll_loss(y.log_softmax(1), t), "bshk", "bsh"),
    "NLL, weighted": _weighted(F.nll_loss, log=True),
    "KL": pair(lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")),
    "KL of logarithms, sum": pair(lambda a, b: F.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="sum", log_target=True)),
    "KL, mean": pair(lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="mean")),
    "BCE": pair(lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid())),
    "BCE with logits": pair(lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid())),
    "BCE with logits, weighted": lambda z: (
        nn.BCEWithLogitsLoss(pos_weight=z.floats("d", 5).exp()),
        [z.floats("bd"), z.floats("bd", 1).sigmoid()],
    ),
    "hinge of embeddings": lambda z: (F.hinge_embedding_loss, [z.floats("bd"), z.signs("bd").double()]),
    "soft margin": lambda z: (F.soft_margin_loss, [z.floats("bd"), z.signs("bd").double()]),
    "multi margin": _labelled(F.multi_margin_loss),
    "multi margin, squared": _labelled(lambda y, t: F.multi_margin_loss(y, t, p=2, margin=0.5)),
    "multi label margin": lambda z: (F.multilabel_margin_loss, [z.floats("bk"), z.ids("bk", z.classes)]),
    "multi label soft margin": lambda z: (F.multilabel_soft_margin_loss, [z.floats("bk"), z.ids("bk", 2).double()]),
    "cosine": lambda z: (F.cosine_embedding_loss, [z.floats("bd"), z.floats("bd", 1), z.signs("b")]),
    "margin of ranks": lambda z: (F.margin_ranking_loss, [z.floats("bd"), z.floats("bd", 1), z.signs("bd")]),
    "triplet": lambda z: (F.triplet_margin_loss, [z.floats("bd"), z.floats("bd", 1), z.floats("bd", 2)]),
    "triplet, swapped": lambda z: (nn.TripletMarginLoss(swap=True), [z.floats("bd"), z.floats("bd", 1), z.floats("bd", 2)]),
    "Poisson": lambda z: (F.poisson_nll_loss, [z.floats("bd"), z.ids("bd", 5).double()]),
    "Poisson, full": lambda z: (nn.PoissonNLLLoss(full=True), [z.floats("bd"), z.ids("bd", 5).double()]),
    # Called by its name, where a capture finds the form that asserts instead of looking at values.
    "Gaussian": lambda z: (lambda *given: F.gaussian_nll_loss(*given), [z.floats("bd"), z.floats("bd", 1), z.floats("bd", 2).exp()]),
    "CTC": _ctc,
}


class Recurrent(nn.Module):
    """What a recurrent layer makes of each step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attending(nn.Module):
    def __init__(self, width: int, heads: int, **options: object) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class Decoding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.layer(x, memory)


class Bags(nn.Module):
    """Rows of a table by bags, with the rows of the first input beside them."""

    def __init__(self, num: int, width: int, **options: object) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(num, width, **options)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * self.bag(ids)


class Looking(nn.Module):
    def __init__(self, num: int, width: int, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(num, width, **options)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * self.table(ids)


def _bags(**options: object) -> Row:
    return lambda z: (Bags(z.classes, z.width, **options), [z.floats("bd"), z.ids("bs", z.classes)])


def _embedding(**options: object) -> Row:
    return lambda z: (Looking(z.classes, z.width, **options), [z.floats("bsd"), z.ids("bs", z.classes)])


def _norm_of(make: Callable[[nn.Module], nn.Module]) -> Row:
    return _layer(lambda z: make(nn.Linear(z.width, z.classes)), "bsd")


def _resized(**options: object) -> Callable[[Sizes], nn.Module]:
    return lambda _: nn.Upsample(**options)


LAYERS: dict[str, Row] = {
    "Linear": _layer(lambda z: nn.Linear(z.width, z.classes), "bsd"),
    "Bilinear": lambda z: (nn.Bilinear(z.width, z.classes, z.channels), [z.floats("bd"), z.floats("bk", 1)]),
    "Embedding": _embedding(),
    "Embedding, padded": _embedding(padding_idx=0),
    "Embedding, scaled": _embedding(scale_grad_by_freq=True),
    "Embedding of bounded norm": _embedding(max_norm=1.0),
    "EmbeddingBag, sum": _bags(mode="sum"),
    "EmbeddingBag, mean": _bags(mode="mean"),
    "EmbeddingBag, max": _bags(mode="max"),
    "EmbeddingBag, sum, padded": _bags(mode="sum", padding_idx=0),
    "EmbeddingBag, mean, padded": _bags(mode="mean", padding_idx=0),
    "Conv1d": _layer(lambda z: nn.Conv1d(z.channels, z.classes, 3, padding=1), "bch"),
    "Conv2d": _layer(lambda z: nn.Conv2d(z.channels, z.classes, 3), "bchs"),
    "Conv2d in groups": _layer(lambda z: nn.Conv2d(z.channels, z.channels, 3, groups=4, stride=2), "bchs"),
    "Conv2d by channel": _layer(lambda z: nn.Conv2d(z.channels, 2 * z.channels, 3, groups=z.channels), "bchs"),
    "Conv2d, dilated": _layer(lambda z: nn.Conv2d(z.channels, z.classes, 3, dilation=2, padding="same"), "bchs"),
    **{
        f"Conv2d, {mode}": _layer(lambda z, mode=mode: nn.Conv2d(z.channels, z.classes, 3, padding=1, padding_mode=mode), "bchs")
        for mode in ("reflect", "replicate", "circular")
    },
    "Conv3d": _layer(lambda z: nn.Conv3d(z.channels, z.classes, 3, bias=False), "bchsd"),
    "ConvTranspose1d": _layer(lambda z: nn.ConvTranspose1d(z.channels, z.classes, 3, stride=2), "bch"),
    "ConvTranspose2d": _layer(lambda z: nn.ConvTranspose2d(z.channels, z.classes, 3, stride=2, output_padding=1), "bchs"),
    "ConvTranspose3d": _layer(lambda z: nn.ConvTranspose3d(z.channels, z.classes, 2, bias=False), "bcshs"),
    "LayerNorm": _layer(lambda z: nn.LayerNorm(z.width), "bsd"),
    "LayerNorm over two dims": _layer(lambda z: nn.LayerNorm((z.length, z.width)), "bsd"),
    "RMSNorm": _layer(lambda z: nn.RMSNorm(z.width), "bsd"),
    "BatchNorm1d": _layer(lambda z: nn.BatchNorm1d(z.channels), "bc"),
    "BatchNorm1d of sequences": _layer(lambda z: nn.BatchNorm1d(z.channels), "bch"),
    "BatchNorm2d": _layer(lambda z: nn.BatchNorm2d(z.channels), "bchs"),
    "BatchNorm2d, inference": _layer(lambda z: nn.BatchNorm2d(z.channels).eval(), "bchs"),
    "BatchNorm3d": _layer(lambda z: nn.BatchNorm3d(z.channels), "bchsd"),
    "GroupNorm": _layer(lambda z: nn.GroupNorm(4, z.channels), "bchs"),
    "InstanceNorm1d": _layer(lambda z: nn.InstanceNorm1d(z.channels, affine=True), "bch"),
    "InstanceNorm2d": _layer(lambda z: nn.InstanceNorm2d(z.channels), "bchs"),
    "LocalResponseNorm": _layer(lambda z: nn.LocalResponseNorm(3), "bchs"),
    "weight norm": _norm_of(torch.nn.utils.parametrizations.weight_norm),
    "spectral norm": _norm_of(torch.nn.utils.parametrizations.spectral_norm),
    "AvgPool1d": _layer(lambda _: nn.AvgPool1d(2), "bch"),
    "AvgPool2d": _layer(lambda _: nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), "bchs"),
    "AvgPool3d": _layer(lambda _: nn.AvgPool3d(2), "bchsd"),
    "MaxPool1d": _layer(lambda _: nn.MaxPool1d(2), "bch"),
    "MaxPool2d": _layer(lambda _: nn.MaxPool2d(3, stride=2, padding=1), "bchs"),
    "MaxPool3d": _layer(lambda _: nn.MaxPool3d(2), "bchsd"),
    "LPPool2d": _layer(lambda _: nn.LPPool2d(2, 2), "bchs"),
    "AdaptiveAvgPool1d": _layer(lambda _: nn.AdaptiveAvgPool1d(3), "bch"),
    "AdaptiveAvgPool2d": _layer(lambda _: nn.AdaptiveAvgPool2d((3, 2)), "bchs"),
    "AdaptiveAvgPool3d": _layer(lambda _: nn.AdaptiveAvgPool3d(2), "bchsd"),
    "AdaptiveMaxPool1d": _layer(lambda _: nn.AdaptiveMaxPool1d(3), "bch"),
    "AdaptiveMaxPool2d": _layer(lambda _: nn.AdaptiveMaxPool2d((3, 2)), "bchs"),
    "AdaptiveMaxPool3d": _layer(lambda _: nn.AdaptiveMaxPool3d(2), "bchsd"),
    "MaxUnpool2d": lambda z: (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), [z.floats("bchs")]),
    "RNN": _layer(lambda z: Recurrent(nn.RNN(z.width, z.channels, batch_first=True)), "bsd"),
    "LSTM, two layers": _layer(lambda z: Recurrent(nn.LSTM(z.width, z.channels, 2, batch_first=True)), "bsd"),
    "GRU, two ways": _layer(lambda z: Recurrent(nn.GRU(z.width, z.channels, batch_first=True, bidirectional=True)), "bsd"),
    "LSTM cell": lambda z: (nn.LSTMCell(z.width, z.channels), [z.floats("bd")]),
    "GRU cell": lambda z: (nn.GRUCell(z.width, z.channels), [z.floats("bd")]),
    "MultiheadAttention": _layer(lambda z: Attending(z.width, 2), "bsd"),
    "MultiheadAttention with a bias of keys": _layer(lambda z: Attending(z.width, 2, add_bias_kv=True), "bsd"),
    "TransformerEncoderLayer": _layer(lambda z: nn.TransformerEncoderLayer(z.width, 2, 16, dropout=0.0, batch_first=True), "bsd"),
    "TransformerEncoderLayer, norm first": _layer(
        lambda z: nn.TransformerEncoderLayer(z.width, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"), "bsd"
    ),
    "TransformerDecoderLayer": lambda z: (Decoding(z.width), [z.floats("bsd"), z.floats("bhd", 1)]),
    "PixelShuffle": _layer(lambda _: nn.PixelShuffle(2), "bchs"),
    "PixelUnshuffle": _layer(lambda _: nn.PixelUnshuffle(2), "bchs"),
    "ChannelShuffle": _layer(lambda _: nn.ChannelShuffle(2), "bchs"),
    "Unfold": _layer(lambda _: nn.Unfold(2, stride=2), "bchs"),
    "Fold": lambda z: (
        lambda x: F.fold(F.unfold(x, 3, padding=1).square(), (z.height, z.length), 3, padding=1),
        [z.floats("bchs")],
    ),
    "Flatten": _layer(lambda _: nn.Flatten(), "bchs"),
    "Unflatten": _layer(lambda z: nn.Unflatten(1, (2, z.channels // 2)), "bch"),
    **{
        f"Upsample, {mode}": _layer(_resized(scale_factor=2, mode=mode), "bchs")
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    "Upsample, aligned": _layer(_resized(scale_factor=2, mode="bilinear", align_corners=True), "bchs"),
    "Upsample, linear": _layer(_resized(scale_factor=2, mode="linear"), "bch"),
    "Upsample, trilinear": _layer(_resized(scale_factor=2, mode="trilinear"), "bshsh"),
    "Upsample, nearest in space": _layer(_resized(scale_factor=2, mode="nearest"), "bshsh"),
    **{
        f"{mode} pad": _layer(lambda _, mode=mode: getattr(nn, f"{mode}Pad2d")((1, 2, 0, 1)), "bchs")
        for mode in ("Reflection", "Replication", "Zero", "Circular")
    },
    "Constant pad": _layer(lambda _: nn.ConstantPad1d((2, -1), 0.5), "bch"),
    "Reflection pad of sequences": _layer(lambda _: nn.ReflectionPad1d(2), "bch"),
    "Replication pad in space": _layer(lambda _: nn.ReplicationPad3d(1), "bshsh"),
    "PReLU": _layer(lambda _: nn.PReLU(), "bcs"),
    "PReLU by channel": _layer(lambda z: nn.PReLU(z.channels), "bcs"),
    "RReLU, inference": _layer(lambda _: nn.RReLU().eval(), "bsd"),
    "GLU": _layer(lambda _: nn.GLU(), "bsd"),
    **{
        name: _layer(lambda _, name=name: getattr(nn, name)(), "bsd")
        for name in (
            "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Softplus Softsign Softshrink Hardshrink Hardtanh Hardswish "
            "Hardsigmoid LogSigmoid Tanhshrink"
        ).split()
    },
    "Threshold": _layer(lambda _: nn.Threshold(0.1, 0.5), "bsd"),
    "Softmax": _layer(lambda _: nn.Softmax(-1), "bsd"),
    "Softmax over the length": _layer(lambda _: nn.Softmax(1), "bsd"),
    "Softmin": _layer(lambda _: nn.Softmin(-1), "bsd"),
    "LogSoftmax": _layer(lambda _: nn.LogSoftmax(-1), "bsd"),
    "Softmax2d": _layer(lambda _: nn.Softmax2d(), "bchs"),
    "CosineSimilarity": lambda z: (nn.CosineSimilarity(-1), [z.floats("bsd"), z.floats("bsd", 1)]),
    "PairwiseDistance": lambda z: (nn.PairwiseDistance(), [z.floats("bd"), z.floats("bd", 1)]),
}
