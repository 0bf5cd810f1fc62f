"""What the joint trace decomposes, by torch's Python decompositions and by ours, against the ops themselves in float64.

A decomposition that autograd sees, registered in Python for the Autograd or CompositeImplicitAutograd key, takes the place of the op
and of its backward without being asked. Those of the installed torch are listed by looking; one without a sample fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey  # pyright: ignore[reportPrivateImportUsage]

from autopar.frontend.capture import capture
from autopar.graph.decompositions import CALLED_INSTEAD, DECOMPOSITIONS
from autopar.ir.mesh import virtual_mesh
from autopar.passes.global_.trace_joint import TraceJoint
from tests.support.programs import inputs_of, run

aten = torch.ops.aten
Sample = Callable[[Tensor], Tensor]
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def shaped(x: Tensor, *shape: int) -> Tensor:
    """A tensor of `shape` that depends on all of x, with no two equal elements."""
    count = torch.Size(shape).numel()
    return (x.sum() * 0.1 + torch.sin(torch.arange(count, dtype=x.dtype) * 1.7 * (1 + x.flatten()[:1]))).reshape(shape)


def resized(shape: tuple[int, ...], mode: str, size: tuple[int, ...] | None = None, scale: float | None = None, **options: bool) -> Sample:
    return lambda x: F.interpolate(shaped(x, *shape), size, scale, mode, **options)


def turned(k: int, x: Tensor) -> Tensor:
    return torch.rot90(shaped(x, 2, 3, 4), k, (2, 0))


def recurrent(kind: str, **options: str) -> Sample:
    torch.manual_seed(0)
    network = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, **options).requires_grad_(False)
    weights, op = (
        [weight.data for weight in network._flat_weights],
        getattr(aten, f"rnn_{options['nonlinearity']}" if options else kind.lower()),
    )

    def call(x: Tensor) -> Tensor:
        state = shaped(x, 4, 2, 4)
        return op.input(shaped(x, 5, 2, 3), [state, state] if kind == "LSTM" else state, weights, True, 2, 0.0, False, True, False)[0]

    return call


_LABELS = torch.tensor([[0, 2, -1, 1, 0], [3, -1, -1, -1, -1], [4, 1, 0, 2, 3], [-1, 2, 0, 0, 0]])
_CLASSES, _WEIGHTS = torch.tensor([0, 3, 4, 1]), torch.tensor([0.5, 1.0, 2.0, 0.1, 0.7], dtype=torch.float64)


def positive(x: Tensor) -> Tensor:
    a = shaped(x, 4, 4)
    return a @ a.mT + torch.eye(4, dtype=x.dtype)


def regular(x: Tensor, *shape: int) -> Tensor:
    """Matrices far from those that have no inverse."""
    return shaped(x, *shape) + 4 * torch.eye(shape[-1], dtype=x.dtype)


def at_the_ends(x: Tensor) -> Tensor:
    """Probabilities of exactly 0 and 1 that have a gradient."""
    free = shaped(x, 6)
    return F.binary_cross_entropy(free - free.detach() + _ENDS, _ENDS.roll(1) * 0.7, reduction="none")


def probability(x: Tensor, reduction: str, weight: Tensor | None = None) -> Tensor:
    """Of which the target, too, has a gradient."""
    return F.binary_cross_entropy(shaped(x, 3, 4).sigmoid(), shaped(x + 1, 3, 4).sigmoid(), weight, reduction=reduction).reshape(-1)


_ENDS = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
SINCE_212 = hasattr(aten, "_upsample_lanczos2d_aa")  # not in torch 2.11
SAMPLES: dict[str, list[Sample]] = {
    "_upsample_bicubic2d_aa.vec": [resized((1, 2, 9, 8), "bicubic", (4, 5), antialias=True)],
    "_upsample_bilinear2d_aa.vec": [resized((1, 2, 9, 8), "bilinear", (4, 5), antialias=True, align_corners=True)],
    "_upsample_lanczos2d_aa.vec": [lambda x: aten._upsample_lanczos2d_aa.vec(shaped(x, 1, 2, 9, 8), [4, 5], False, None)] * SINCE_212,
    "_upsample_nearest_exact1d.default": [lambda x: aten._upsample_nearest_exact1d.default(shaped(x, 1, 2, 7), [4])],
    "_upsample_nearest_exact1d.vec": [resized((1, 2, 7), "nearest-exact", (4,)), resized((1, 2, 7), "nearest-exact", scale=1.7)],
    "_upsample_nearest_exact2d.default": [lambda x: aten._upsample_nearest_exact2d.default(shaped(x, 1, 2, 7, 4), [4, 9])],
    "_upsample_nearest_exact2d.vec": [resized((1, 2, 7, 4), "nearest-exact", (4, 9)), resized((1, 2, 7, 4), "nearest-exact", scale=1.7)],
    "_upsample_nearest_exact3d.default": [lambda x: aten._upsample_nearest_exact3d.default(shaped(x, 1, 2, 3, 4, 5), [5, 2, 7])],
    "_upsample_nearest_exact3d.vec": [resized((1, 2, 3, 4, 5), "nearest-exact", (5, 2, 7))],
    "broadcast_tensors.default": [lambda x: torch.broadcast_tensors(shaped(x, 3, 1), shaped(x, 1, 4))[0] * 2],
    "dropout.default": [lambda x: F.dropout(shaped(x, 3, 4), 0.5, training=False)],
    "gru.input": [recurrent("GRU")],
    "hardshrink.default": [lambda x: F.hardshrink(shaped(x, 3, 4), 0.3)],
    "lstm.input": [recurrent("LSTM")],
    "matmul.default": [
        lambda x: shaped(x, 2, 1, 3, 4) @ shaped(x, 5, 4, 2),
        lambda x: shaped(x, 4) @ shaped(x, 3, 4, 2),
        lambda x: shaped(x, 2, 3, 4) @ shaped(x, 4),
        lambda x: (shaped(x, 4) @ shaped(x, 4)).reshape(1),
    ],
    "multi_margin_loss.default": [
        lambda x: F.multi_margin_loss(shaped(x, 4, 5), _CLASSES).reshape(1),
        lambda x: F.multi_margin_loss(shaped(x, 4, 5), _CLASSES, p=2, margin=0.5, weight=_WEIGHTS, reduction="none"),
        lambda x: F.multi_margin_loss(shaped(x, 5), _CLASSES[1], weight=_WEIGHTS, reduction="sum").reshape(1),
    ],
    "multilabel_margin_loss_forward.default": [
        lambda x: F.multilabel_margin_loss(shaped(x, 4, 5), _LABELS).reshape(1),
        lambda x: F.multilabel_margin_loss(shaped(x, 4, 5), _LABELS, reduction="none"),
        lambda x: F.multilabel_margin_loss(shaped(x, 5), _LABELS[0], reduction="sum").reshape(1),
    ],
    "native_batch_norm.default": [lambda x: F.batch_norm(shaped(x, 4, 3, 2), None, None, shaped(x, 3), shaped(x, 3), training=True)],
    "one_hot.default": [lambda x: shaped(x, 4, 5) * F.one_hot((shaped(x, 4) > 0).long(), 5)],
    "pad_sequence.default": [lambda x: nn.utils.rnn.pad_sequence([shaped(x, 3, 2), shaped(x, 5, 2)], padding_value=0.5)],
    "rnn_relu.input": [recurrent("RNN", nonlinearity="relu")],
    "rnn_tanh.input": [recurrent("RNN", nonlinearity="tanh")],
    "softshrink.default": [lambda x: F.softshrink(shaped(x, 3, 4), 0.3)],
    "stft.center": [
        lambda x: torch.view_as_real(torch.stft(shaped(x, 64), 16, 4, window=torch.hann_window(16, dtype=x.dtype), return_complex=True))
    ],
    "to_dense.default": [lambda x: x.to_dense()],  # since torch 2.14
    "unsafe_chunk.default": [lambda x: torch.unsafe_chunk(shaped(x, 7, 2), 3)[2] * 2],
    "upsample_bicubic2d.default": [lambda x: aten.upsample_bicubic2d.default(shaped(x, 1, 2, 5, 4), [7, 9], True)],
    "upsample_bicubic2d.vec": [resized((1, 2, 5, 4), "bicubic", (7, 9)), resized((1, 2, 5, 4), "bicubic", scale=1.6, align_corners=True)],
    "upsample_bilinear2d.default": [lambda x: aten.upsample_bilinear2d.default(shaped(x, 1, 2, 5, 4), [7, 3], False)],
    "upsample_bilinear2d.vec": [
        resized((1, 2, 5, 4), "bilinear", (7, 3)),
        resized((1, 2, 5, 4), "bilinear", scale=1.6, align_corners=True),
    ],
    "upsample_linear1d.vec": [resized((1, 2, 5), "linear", (8,)), resized((1, 2, 5), "linear", (3,), align_corners=True)],
    "upsample_nearest1d.default": [lambda x: aten.upsample_nearest1d.default(shaped(x, 1, 2, 7), [4])],
    "upsample_nearest1d.vec": [resized((1, 2, 7), "nearest", (4,)), resized((1, 2, 7), "nearest", scale=1.7)],
    "upsample_nearest2d.default": [lambda x: aten.upsample_nearest2d.default(shaped(x, 1, 2, 7, 4), [4, 9])],
    "upsample_nearest2d.vec": [resized((1, 2, 7, 4), "nearest", (4, 9)), resized((1, 2, 7, 4), "nearest", scale=1.7)],
    "upsample_nearest3d.default": [lambda x: aten.upsample_nearest3d.default(shaped(x, 1, 2, 3, 4, 5), [5, 2, 7])],
    "upsample_nearest3d.vec": [resized((1, 2, 3, 4, 5), "nearest", (5, 2, 7))],
    "upsample_trilinear3d.vec": [resized((1, 2, 3, 4, 5), "trilinear", (5, 2, 7)), resized((1, 2, 3, 4, 5), "trilinear", scale=1.5)],
}
OURS: dict[str, list[Sample]] = {
    "new_zeros.default": [lambda x: shaped(x, 3) + x.new_zeros(3)],
    "new_ones.default": [lambda x: shaped(x, 3) * x.new_ones(3, dtype=torch.float32)],
    "new_full.default": [lambda x: shaped(x, 3) * x.new_full((3,), 2.5)],
    "new_empty.default": [lambda x: shaped(x, 3, 2) + x.new_empty(3, 2, dtype=torch.float32).copy_(shaped(x, 2))],
    "new_empty_strided.default": [
        lambda x: shaped(x, 3, 2) * x.new_empty_strided((3, 2), (1, 3)).copy_(shaped(x, 2)),
        lambda x: shaped(x, 3, 2) * x.new_empty_strided((3, 2), (4, 2)).copy_(shaped(x, 2)),
    ],
    "rot90.default": [partial(turned, k) for k in range(-2, 4)],
    "binary_cross_entropy.default": [
        *(partial(probability, reduction=reduction) for reduction in ("none", "mean", "sum")),
        partial(probability, reduction="mean", weight=torch.arange(4, dtype=torch.float64)),
    ],
    "binary_cross_entropy_backward.default": [at_the_ends, partial(probability, reduction="sum", weight=_WEIGHTS[:4])],
    "addmm.default": [lambda x: torch.addmm(shaped(x, 4), shaped(x, 3, 2), shaped(x, 2, 4), beta=0.5, alpha=3)],
    "baddbmm.default": [lambda x: torch.baddbmm(shaped(x, 3, 4), shaped(x, 2, 3, 2), shaped(x, 2, 2, 4), beta=0.5, alpha=3)],
    "mean.dim": [lambda x: shaped(x, 3, 4, 5).mean((0, -1)), lambda x: shaped(x, 3, 4).mean(1, keepdim=True)],
    "mean.default": [lambda x: shaped(x, 3, 4).mean().reshape(1), lambda x: shaped(x, 1)[0].mean(0).reshape(1)],
    "_weight_norm.default": [
        lambda x: torch._weight_norm(shaped(x, 3, 4), shaped(x, 3, 1), 0),
        lambda x: torch._weight_norm(shaped(x, 3, 4, 2), shaped(x, 1, 4, 1), 1),
        lambda x: torch._weight_norm(shaped(x, 3, 4, 2), shaped(x, 1, 4, 1), -2),
        lambda x: torch._weight_norm(shaped(x, 3, 4), shaped(x, 1)[0], -1),
    ],
    # The trace has these for whatever reads a conjugate, or its imaginary part.
    "_conj.default": [
        lambda x: torch.view_as_real(torch.view_as_complex(shaped(x, 3, 2)).conj().resolve_conj()),
        lambda x: torch.view_as_real(torch.exp(0.1j * shaped(x, 3)) * (1 + 0.3j)),
    ],
    "_neg_view.default": [lambda x: torch.view_as_complex(shaped(x, 3, 2)).conj().imag.sin()],
    "rrelu.default": [lambda x: F.rrelu(shaped(x, 3, 4)), lambda x: F.rrelu(shaped(x, 3, 4), 0.1, 0.4)],
    "rrelu_.default": [lambda x: F.rrelu(2 * shaped(x, 3, 4), inplace=True)],
    "multilabel_margin_loss.default": SAMPLES["multilabel_margin_loss_forward.default"],
    "linalg_det.default": [lambda x: torch.linalg.det(regular(x, 2, 4, 4)), lambda x: torch.linalg.det(regular(x, 4, 4).mT).reshape(1)],
    "det.default": [lambda x: torch.det(regular(x, 3, 3)).reshape(1)],
    "linalg_slogdet.default": [
        lambda x: torch.linalg.slogdet(regular(x, 2, 4, 4))[1],
        lambda x: torch.linalg.slogdet(regular(x, 3, 3).mT)[1].reshape(1),
    ],
    "slogdet.default": [lambda x: torch.slogdet(regular(x, 3, 3))[1].reshape(1)],
    "affine_grid_generator.default": [
        lambda x: F.affine_grid(shaped(x, 2, 2, 3), (2, 1, 3, 5), align_corners=False),
        lambda x: F.affine_grid(shaped(x, 2, 2, 3), (2, 4, 1, 4), align_corners=True),
        lambda x: F.affine_grid(shaped(x, 1, 3, 4), (1, 2, 2, 3, 4), align_corners=True),
        lambda x: F.affine_grid(shaped(x, 2, 3, 4), (2, 2, 1, 3, 2), align_corners=False),
    ],
    "pad.default": [
        lambda x: F.pad(shaped(x, 2, 3, 4), (1, 3), mode="circular"),
        lambda x: F.pad(shaped(x, 2, 3, 4, 5), (0, 2, 3, 1), mode="circular"),
        lambda x: F.pad(shaped(x, 2, 1, 3, 4, 2), (1, 1, 4, 0, 2, 3), mode="circular"),
        lambda x: F.pad(shaped(x, 2, 4, 5), (-1, 2), mode="circular"),
        lambda x: F.pad(shaped(x, 2, 4, 5), (1, 2), mode="reflect"),
        lambda x: F.pad(shaped(x, 4, 5), (1, -1, 2, 0), value=0.5),
    ],
    # Torch 2.11 has a wrong gradient of a high matrix's.
    "trace.default": [lambda x: torch.trace(shaped(x, 3, 5)).reshape(1), *[lambda x: torch.trace(shaped(x, 4, 2)).reshape(1)] * SINCE_212],
    "logdet.default": [lambda x: torch.logdet(regular(x, 3, 3) @ regular(x, 3, 3).mT).reshape(1)],
}
# By name: why there is no sample.
LEFT_OUT = {
    "cudnn_batch_norm.default": "cuDNN's alone",
    "miopen_batch_norm.default": "MIOpen's alone; there once Inductor was imported",
    "empty.out": "has no values",
    "istft.default": "reads whether the window covers the signal",
    "matmul.out": "export writes nothing to out=",
    **{f"{each}.data": "packed lengths are values of a tensor" for each in ("gru", "lstm", "rnn_relu", "rnn_tanh")},
    "tensor_split.tensor_indices_or_sections": "its shapes are values of a tensor",
}


def seen_by_autograd() -> set[str]:
    """Overloads of aten with a decomposition in Python that stands in the op's place before autograd."""
    found = set[str]()
    for packet in (getattr(aten, name) for name in dir(aten)):
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if any(key in op.py_kernels for key in _KEYS):
                found.add(str(op).removeprefix("aten."))
    return found


class Model(nn.Module):
    """Each sample has a parameter of its own, so that a gradient says which of them is wrong."""

    def __init__(self, samples: list[tuple[str, Sample]]) -> None:
        super().__init__()
        self.samples = samples
        self.inputs = nn.ParameterDict({name: nn.Parameter(torch.randn(6, dtype=torch.float64)) for name, _ in samples})

    def forward(self, scale: Tensor) -> dict[str, Tensor]:
        found = {name: sample(self.inputs[name] * scale) for name, sample in self.samples}
        return {"loss": sum((torch.sin(value.flatten() * 1.3).sum() for value in found.values()), scale.sum() * 0)}


def assert_as_the_ops(samples: dict[str, list[Sample]]) -> None:
    torch.manual_seed(0)
    model = Model([(f"{name.replace('.', '_')}_{index}", each) for name, found in samples.items() for index, each in enumerate(found)])
    scale = torch.tensor([1.0], dtype=torch.float64)
    loss = model(scale)["loss"]
    loss.backward()
    joint = TraceJoint().apply(capture(model, (scale,), {}, virtual_mesh(dp=1), batch_dims=None))
    results = run(joint, inputs_of(joint, model, (scale,), {}))
    wrong = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), f"{name} does not reach the loss"
        error = float((results[("gradient", name)] - parameter.grad).abs().max() / parameter.grad.abs().max())
        wrong |= {name: error} if not error < 1e-10 else {}
    assert not wrong
    torch.testing.assert_close(results[("loss", "0")], loss.detach(), atol=1e-10, rtol=1e-10)


def test_every_decomposition_has_a_sample() -> None:
    assert seen_by_autograd() - LEFT_OUT.keys() - SAMPLES.keys() == set()
    ours = {str(target).removeprefix("aten.") for target in (*DECOMPOSITIONS, *CALLED_INSTEAD)}
    assert ours == OURS.keys()


def test_our_decompositions() -> None:
    assert_as_the_ops(OURS)


@pytest.mark.parametrize("part", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("upsample", "rnn lstm gru")), ""])
def test_torchs_decompositions_that_autograd_sees(part: str) -> None:
    parts = {each: [name for name in SAMPLES if any(word in name for word in each.split())] for each in ("upsample", "rnn lstm gru")}
    names = parts[part] if part else [name for name in SAMPLES if not any(name in each for each in parts.values())]
    assert_as_the_ops({name: SAMPLES[name] for name in names})
