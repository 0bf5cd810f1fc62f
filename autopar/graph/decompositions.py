"""What the joint trace takes apart, and calls in the place of ops of torch: those that have no rule for ranks, or a decomposition that is
wrong, and those whose backward is one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.graph.determinants import det, logdet, slogdet

aten = torch.ops.aten

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_LEAST_VARIANCE = 9.999999960041972e-13  # 1e-12 in float32, as which torch's kernels hold it, for float64, too


def _rrelu(in_place: bool) -> Callable[..., torch.Tensor]:
    """In evaluation, where it draws nothing; `KeyRandom` takes the draws out of it in training."""

    def rrelu(x: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> torch.Tensor:
        assert not training
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2, inplace=in_place)

    return rrelu


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """theta[n, d, d + 1] → [n, *size of the space, d], in ops of which each sample is one; torch's is one op, of no sample by itself."""

    def along(count: int) -> torch.Tensor:
        reach = 0.0 if count == 1 else 1.0 if align_corners else (count - 1) / count
        return torch.linspace(-reach, reach, count, dtype=theta.dtype, device=theta.device)

    axes = torch.meshgrid(*map(along, size[2:]), indexing="ij")
    places = torch.stack([*reversed(axes), torch.ones_like(axes[0])], -1)
    return (places.flatten(0, -2) @ theta.mT).unflatten(1, size[2:])


def _pad(x: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Around a circle by what stands there; torch writes that into memory that it has not filled yet."""
    if mode != "circular" or min(pad) < 0:
        return aten.pad.default(x, pad, mode, value)
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        x = torch.cat([x.narrow(-dim, x.shape[-dim] - before, before), x, x.narrow(-dim, 0, after)], -dim)
    return x


def _trace(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal().sum()


def _conj(x: torch.Tensor | complex) -> torch.Tensor:
    """A number stands for the tensor that autograd makes of a factor that is one."""
    return aten.conj_physical.default(x) if isinstance(x, torch.Tensor) else torch.full((), x.conjugate(), dtype=torch.complex128)


def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """Labels of a row end at its first −1. torch's decomposition counts class 0 for each place after that."""
    is_given = (target == -1).cumsum(-1) == 0
    labels = torch.where(is_given, target, 0)
    is_label = ((labels[..., None] == torch.arange(x.shape[-1], device=x.device)) & is_given[..., None]).any(-2)
    margins = torch.relu(1.0 - x.gather(-1, labels)[..., None] + x[..., None, :])
    rows = torch.where(is_given[..., None] & ~is_label[..., None, :], margins, 0.0).sum((-1, -2)) / x.shape[-1]
    return (rows, rows.mean(), rows.sum())[reduction]


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """In ops that have rules, and a backward that is a sum over samples for all to see; the norm of 16 bits in float32, as on CUDA.

    A `dim` of −1 is no last dim: it stands for the norm of all elements.
    """
    kept = dim if dim == -1 else dim % v.dim()
    others = [each for each in range(v.dim()) if each != kept]
    norm = torch.linalg.vector_norm(v, 2, others, keepdim=True, dtype=torch.float32 if g.dtype == torch.bfloat16 else None)
    return v * (g / norm.to(g.dtype))


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """mm and add apart: a split contraction must be reduced before the bias is added."""
    product = torch.mm(left, right)
    product = product * alpha if alpha != 1 else product
    return product + (bias * beta if beta != 1 else bias)


def _baddbmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    product = torch.bmm(left, right)
    product = product * alpha if alpha != 1 else product
    return product + (bias * beta if beta != 1 else bias)


def _mean(x: torch.Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A sum and a division by the logical count: a sum may stay unreduced, a mean may not."""
    # A number has a dim 0 for those who ask for it.
    dims = list(range(x.ndim)) if not dim or not x.ndim else list(dim)
    count = 1
    for index in dims:
        count *= x.shape[index]
    # A sum of 16-bit numbers overflows (fp16) or is rounded (bf16) where their mean does not: torch, too, adds up in float32.
    wanted = dtype or x.dtype
    wide = torch.float32 if wanted in _SIXTEEN_BITS else dtype
    mean = torch.sum(x, dims, keepdim, dtype=wide) / count
    return mean.to(wanted) if wide is torch.float32 else mean


def _mean_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean(x, None, False, dtype=dtype)


def _binary_cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1) -> torch.Tensor:
    """Logarithms are −100 at least, as torch's are. x outside [0, 1], for which torch raises when it runs, gives NaN."""
    wide = torch.float32 if x.dtype in _SIXTEEN_BITS else x.dtype
    value, wanted = x.to(wide), target.to(wide)
    rows = (wanted - 1) * torch.log1p(-value).clamp(min=-100) - wanted * torch.log(value).clamp(min=-100)
    rows = rows if weight is None else rows * weight
    return (rows, rows.sum() / rows.numel(), rows.sum())[reduction].to(x.dtype)


def _binary_cross_entropy_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    """torch's own formula: where x is 0 or 1 it is large, while the derivative of a logarithm cut off at −100 would be 0."""
    wide = torch.float32 if x.dtype in _SIXTEEN_BITS else x.dtype
    value = x.to(wide)
    slope = (value - target.to(wide)) / ((1 - value) * value).clamp(min=_LEAST_VARIANCE) * gradient
    slope = slope if weight is None else slope * weight
    return (slope / slope.numel() if reduction == 1 else slope).to(x.dtype)


def _new(*default: float) -> Callable[..., torch.Tensor]:
    """`x.new_zeros(shape)` and its like without x, of which no more than dtype and device is asked: x would be gathered for that."""

    def new(x: torch.Tensor, size: list[int], *values: float, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        (filling,) = values or default
        return torch.full(size, filling, dtype=dtype or x.dtype, device=options.get("device") or x.device)

    return new


def _new_empty(x: torch.Tensor, size: list[int], *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype or x.dtype, device=options.get("device") or x.device)


def _new_empty_strided(
    x: torch.Tensor, size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """Likewise; dims that lie in another order are permuted. Of what has gaps the op stays."""
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    found = _new_empty(x, [size[dim] for dim in order], dtype=dtype, **options).permute([order.index(dim) for dim in range(len(size))])
    return found if list(found.stride()) == list(stride) else NotImplemented


def _rot90(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    """Turned k times by a quarter, in ops of which each is a view or a move."""
    first, second = dims
    if k % 2:
        return x.flip(second).transpose(first, second) if k % 4 == 1 else x.flip(first).transpose(first, second)
    return x.flip(first, second) if k % 4 else x.clone()


# Called before autograd sees the op: the backward is that of these.
CALLED_INSTEAD: dict[Any, Any] = {
    aten.rrelu.default: _rrelu(in_place=False),
    aten.rrelu_.default: _rrelu(in_place=True),
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
    aten._weight_norm.default: _weight_norm,
    aten.linalg_det.default: det,
    aten.det.default: det,
    aten.linalg_slogdet.default: slogdet,
    aten.slogdet.default: slogdet,
    aten.logdet.default: logdet,
    aten.affine_grid_generator.default: _affine_grid,
    aten.pad.default: _pad,
    aten.trace.default: _trace,
}

# In the place of ops of the joint graph, those of the backward among them.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.new_zeros.default: _new(0),
    aten.new_ones.default: _new(1),
    aten.new_full.default: _new(),
    aten.new_empty.default: _new_empty,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.rot90.default: _rot90,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.binary_cross_entropy_backward.default: _binary_cross_entropy_backward,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.mean.dim: _mean,
    aten.mean.default: _mean_all,
    # Marks on views, which say that memory is read as its conjugate, are lost where ranks exchange what lies there.
    aten._conj.default: _conj,
    aten._neg_view.default: aten.neg.default,
}
