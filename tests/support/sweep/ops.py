"""Ops of torch, each as a row of the sweep: see `tests/support/sweep/rows.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.sweep.rows import Computed, Row, Sizes, of, pair


def _indexed(compute: Computed, dims: str, ids: str, along: str, values: str = "") -> Row:
    """(x, ids below the size of the dim `along`, values?)"""

    def make(z: Sizes) -> tuple[Computed, list[Tensor]]:
        found = [z.floats(dims), z.ids(ids, z.shape(along)[0])]
        return compute, [*found, z.floats(values, 1)] if values else found

    return make


def _permuted(compute: Computed) -> Row:
    """(x, a permutation of its width, values like x)"""
    return lambda z: (compute, [z.floats("bsd"), torch.randperm(z.width, generator=torch.Generator().manual_seed(1)), z.floats("bsd", 1)])


def _square(x: Tensor) -> Tensor:
    return x.mT @ x + torch.eye(x.shape[-1], dtype=x.dtype)


def _written_under_masks(x: Tensor) -> Tensor:
    mask = x.sum(-1) > 0
    found = x.clone()
    found[mask] = x[mask].exp() * x[0, 0] - found[mask]
    found[x > 1] *= 0.5
    return found


OPS: dict[str, Row] = {
    "einsum": lambda z: (lambda a, b: torch.einsum("bsd,bhd->bsh", a, b), [z.floats("bsd"), z.floats("bhd", 1)]),
    "einsum over three": lambda z: (
        lambda a, b, c: torch.einsum("bsd,dk,bk->bs", a, b, c),
        [z.floats("bsd"), z.floats("dk", 1), z.floats("bk", 2)],
    ),
    "einsum of a diagonal": of(lambda x: torch.einsum("bii->bi", _square(x))),
    "matmul": lambda z: (torch.matmul, [z.floats("bsd"), z.floats("bdh", 1)]),
    "matmul with a vector": lambda z: (torch.matmul, [z.floats("bsd"), z.floats("d", 1)]),
    "bmm": lambda z: (torch.bmm, [z.floats("bsd"), z.floats("bdh", 1)]),
    "baddbmm": lambda z: (lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5), [z.floats("bsd"), z.floats("bdh", 1), z.floats("bsh", 2)]),
    "addmm": lambda z: (lambda a, b, c: torch.addmm(c, a, b, alpha=2.0), [z.floats("bd"), z.floats("dh", 1), z.floats("h", 2)]),
    "outer": lambda z: (lambda a, b: torch.outer(a[0], b), [z.floats("bd"), z.floats("h", 1)]),
    "inner": lambda z: (torch.inner, [z.floats("bd"), z.floats("hd", 1)]),
    "tensordot": lambda z: (lambda a, b: torch.tensordot(a, b, ([2], [1])), [z.floats("bsd"), z.floats("hd", 1)]),
    "kron": lambda z: (torch.kron, [z.floats("bd"), z.floats("hs", 1)]),
    "cdist": lambda z: (torch.cdist, [z.floats("bsd"), z.floats("bhd", 1)]),
    "cdist, L1": lambda z: (lambda a, b: torch.cdist(a, b, p=1.0), [z.floats("bsd"), z.floats("bhd", 1)]),
    "pdist": of(F.pdist, "bd"),
    "cross": lambda z: (lambda a, b: torch.linalg.cross(a[..., :3], b), [z.floats("bsd"), z.floats("bsd", 1)[..., :3]]),
    "trace": of(lambda x: torch.trace(_square(x)), "sd"),
    "diag": of(lambda x: torch.diag(_square(x)), "sd"),
    "diagonal": of(lambda x: torch.diagonal(_square(x), offset=1, dim1=1, dim2=2)),
    "diag_embed": of(torch.diag_embed),
    "tril": of(torch.tril),
    "triu": of(lambda x: torch.triu(x, 1)),
    "cumsum": of(lambda x: x.cumsum(1)),
    "cumsum over the batch": of(lambda x: x.cumsum(0)),
    "cumprod": of(lambda x: x.cumprod(1)),
    "logcumsumexp": of(lambda x: x.logcumsumexp(1)),
    "cummax": of(lambda x: x.cummax(1).values),
    "sort": of(lambda x: x.sort(-1).values),
    "sort over the batch": of(lambda x: x.sort(0, descending=True).values),
    "argsort": of(lambda x: x.gather(1, x.argsort(1))),
    "topk": of(lambda x: x.topk(3, -1).values),
    "median": of(lambda x: x.median(-1).values),
    "median of all": of(torch.median),
    "kthvalue": of(lambda x: x.kthvalue(2, 1).values),
    "quantile": of(lambda x: x.quantile(0.3, dim=-1)),
    "mode": of(lambda x: x.round().mode(-1).values * x.mean(-1)),
    "max": of(lambda x: x.max(1).values),
    "max over the batch": of(lambda x: x.max(0).values),
    "max of all": of(torch.max),
    "amax": of(lambda x: x.amax((1, 2))),
    "amin over the batch": of(lambda x: x.amin(0)),
    "aminmax": of(lambda x: sum(x.aminmax(dim=-1))),
    "argmax": of(lambda x: x * F.one_hot(x.argmax(-1), x.shape[-1])),
    "prod": of(lambda x: x.prod(1)),
    "prod of all": of(lambda x: (1 + 0.01 * x).prod()),
    "mean over the batch": of(lambda x: x.mean(0)),
    "var": of(lambda x: x.var(-1)),
    "var over the batch": of(lambda x: x.var(0, correction=0)),
    "std of all": of(torch.std),
    "var_mean": of(lambda x: torch.var_mean(x, 1)),
    "logsumexp": of(lambda x: x.logsumexp(-1)),
    "logsumexp over the batch": of(lambda x: x.logsumexp((0, 1))),
    "norm": of(lambda x: x.norm(dim=-1)),
    "norm of all": of(torch.norm),
    "norm, L1": of(lambda x: torch.linalg.vector_norm(x, 1, dim=1)),
    "norm, maximum": of(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1)),
    "norm, L3": of(lambda x: x.norm(3, dim=(1, 2))),
    "norm of matrices": of(lambda x: torch.linalg.matrix_norm(x)),
    "normalize": of(lambda x: F.normalize(x, dim=1)),
    "renorm": of(lambda x: x.renorm(2, 0, 1.0)),
    "dist": pair(torch.dist),
    "gather": _indexed(lambda x, i: x.gather(1, i), "bsd", "bhd", "s"),
    "gather over the batch": _indexed(lambda x, i: x.gather(0, i), "bsd", "bsd", "b"),
    "take_along_dim": _indexed(lambda x, i: torch.take_along_dim(x, i, 2), "bsd", "bsk", "d"),
    "take": _indexed(lambda x, i: x.take(i), "bsd", "hk", "d"),
    "index_select": _indexed(lambda x, i: x.index_select(1, i), "bsd", "k", "s"),
    "index": _indexed(lambda x, i: x[i], "bsd", "hk", "b"),
    "index in the middle": _indexed(lambda x, i: x[:, i], "bsd", "k", "s"),
    "index by two": _indexed(lambda x, i: x[torch.arange(i.shape[0]), i], "bsd", "b", "s"),
    "index by a mask": of(lambda x: x.masked_fill(x > 0, 0.0).sum(-1) + torch.where(x > 1, x, 0.0).sum(-1)),
    "scatter": _permuted(lambda x, i, v: x.scatter(2, i.expand_as(x), v)),
    "scatter of a number": _permuted(lambda x, i, _: x.scatter(2, i[:3].expand(*x.shape[:2], 3), 1.5)),
    "scatter_add": _indexed(lambda x, i, v: x.scatter_add(1, i, v), "bsd", "bhd", "s", "bhd"),
    "scatter_add into zeros": _indexed(lambda x, i: torch.zeros_like(x).scatter_add(1, i, x), "bsd", "bsd", "s"),
    "scatter_reduce": _indexed(lambda x, i, v: x.scatter_reduce(1, i, v, "amax"), "bsd", "bhd", "s", "bhd"),
    "scatter_reduce, mean": _indexed(lambda x, i, v: x.scatter_reduce(1, i, v, "mean", include_self=False), "bsd", "bhd", "s", "bhd"),
    "index_add": _indexed(lambda x, i, v: x.index_add(1, i, v), "bsd", "h", "s", "bhd"),
    "index_add into zeros": _indexed(lambda x, i: torch.zeros_like(x).index_add(0, i, x), "bsd", "b", "b"),
    "index_copy": _permuted(lambda x, i, v: x.index_copy(2, i, v)),
    "index_fill": _permuted(lambda x, i, _: x.index_fill(2, i[:3], 0.5)),
    "index_put": _indexed(lambda x, i, v: x.index_put((i,), v, accumulate=True), "bsd", "h", "b", "hsd"),
    "index_reduce": _indexed(lambda x, i, v: x.index_reduce(1, i, v, "mean"), "bsd", "h", "s", "bhd"),
    "write under a mask": of(_written_under_masks),
    "masked_scatter": lambda z: (lambda x, v: x.masked_scatter(v > 0, v), [z.floats("bsd"), z.floats("bsd", 1)]),
    "masked_fill": of(lambda x: x.masked_fill(x > 0.5, -1.0)),
    "where": pair(lambda a, b: torch.where(a > b, a, 0.5 * b)),
    "select_scatter": lambda z: (lambda x, v: x.select_scatter(v, 1, 2), [z.floats("bsd"), z.floats("bd", 1)]),
    "slice_scatter": lambda z: (lambda x, v: x.slice_scatter(v, 2, 1, 4), [z.floats("bsd"), z.floats("bsd", 1)[..., :3]]),
    "diagonal_scatter": lambda z: (lambda x, v: _square(x).diagonal_scatter(v), [z.floats("sd"), z.floats("d", 1)]),
    "searchsorted": lambda z: (lambda x, v: x * torch.searchsorted(v.sort(-1).values, x), [z.floats("bsd"), z.floats("bsh", 1)]),
    "bucketize": lambda z: (lambda x, v: x * torch.bucketize(x, v.sort().values), [z.floats("bsd"), z.floats("h", 1)]),
    "isin": lambda z: (lambda x, i: x * torch.isin(i, torch.tensor([1, 3])), [z.floats("bsd"), z.ids("bsd", 5)]),
    "one_hot": _indexed(lambda x, i: x * F.one_hot(i, x.shape[-1]), "bsd", "bs", "d"),
    "roll": of(lambda x: x.roll((1, 2), (1, 2))),
    "roll over the batch": of(lambda x: x.roll(1, 0)),
    "roll of all": of(lambda x: x.roll(3)),
    "flip": of(lambda x: x.flip(1)),
    "flip over the batch": of(lambda x: x.flip(0, 2)),
    "rot90": of(lambda x: x.rot90(1, (1, 2))),
    "repeat": of(lambda x: x.repeat(2, 1, 3)),
    "repeat_interleave": of(lambda x: x.repeat_interleave(3, 1)),
    "repeat_interleave over the batch": of(lambda x: x.repeat_interleave(2, 0)),
    "tile": of(lambda x: x.tile(2)),
    "expand": of(lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1).square()),
    "unfold": of(lambda x: x.unfold(1, 3, 2)),
    "view": of(lambda x: x.reshape(-1, x.shape[-1]).softmax(0)),
    "flatten and back": of(lambda x: x.flatten(1).softmax(-1).unflatten(1, x.shape[1:])),
    "movedim": of(lambda x: x.movedim(0, 2).cumsum(0)),
    "swapped and viewed": of(lambda x: x.transpose(1, 2).reshape(x.shape[0], -1).cumsum(1)),
    "chunk": of(lambda x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0].exp()], -1)),
    "split": of(lambda x: torch.stack([part.sum(-1) for part in x.split([3, x.shape[-1] - 3], -1)])),
    "unbind": of(lambda x: sum(i * part for i, part in enumerate(x.unbind(1)))),
    "stack": pair(lambda a, b: torch.stack([a, b], 1)),
    "cat over the batch": pair(lambda a, b: torch.cat([a, b])),
    "hstack": pair(lambda a, b: torch.hstack([a, b.exp()])),
    "meshgrid": lambda z: (lambda a, b: torch.mul(*torch.meshgrid(a[0], b, indexing="ij")), [z.floats("bd"), z.floats("h", 1)]),
    "cartesian": of(lambda x: torch.combinations(x[0]), "bd"),
    "as_strided": of(lambda x: torch.as_strided(x, (3, 4), (2, 1))),
    "narrow": of(lambda x: x.narrow(1, 1, 3)),
    "slices with steps": of(lambda x: x[:, ::2, 1:-1]),
    "diff": of(lambda x: x.diff(dim=1)),
    "trapezoid": of(lambda x: torch.trapezoid(x, dim=-1)),
    "fft": of(lambda x: torch.fft.rfft(x).abs()),
    "fft over the length": of(lambda x: torch.fft.fft(x, dim=1).real),
    "fft of planes": of(lambda x: torch.fft.fft2(x).imag),
    "stft": of(lambda x: torch.stft(x.flatten(1), 8, 4, return_complex=True).abs(), "bsd"),
    "complex products": pair(lambda a, b: (torch.complex(a, b) * torch.polar(a.abs(), b)).real),
    "erf": of(torch.erf),
    "lerp": pair(lambda a, b: torch.lerp(a, b, 0.3)),
    "addcmul": pair(lambda a, b: torch.addcmul(a, a, b, value=0.5)),
    "atan2": pair(torch.atan2),
    "hypot": pair(torch.hypot),
    "fmod": pair(lambda a, b: torch.fmod(a, b.abs() + 0.5)),
    "remainder": pair(lambda a, b: torch.remainder(a, b.abs() + 0.5)),
    "pow": pair(lambda a, b: (a.abs() + 0.1).pow(b)),
    "xlogy": pair(lambda a, b: torch.xlogy(a, b.abs() + 0.1)),
    "logaddexp": pair(torch.logaddexp),
    "clamp by tensors": pair(lambda a, b: a.clamp(-b.abs(), b.abs())),
    "maximum": pair(torch.maximum),
    "nan_to_num": of(lambda x: x.nan_to_num()),
    "lgamma": of(lambda x: torch.lgamma(x.abs() + 0.5)),
    "digamma": of(lambda x: torch.digamma(x.abs() + 0.5)),
    "frac": of(torch.frac),
    "sinc": of(torch.sinc),
    "grid_sample": lambda z: (
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        [z.floats("bchs"), z.floats("bhs", 1).unsqueeze(-1).expand(-1, -1, -1, 2)],
    ),
    "affine_grid": lambda z: (
        lambda x, a: F.grid_sample(x, F.affine_grid(a.view(-1, 2, 3), list(x.shape), align_corners=True), align_corners=True),
        [z.floats("bchs"), z.floats("b", 1).unsqueeze(-1).expand(-1, 6) * 0.1],
    ),
    "attention": lambda z: (lambda q, k: F.scaled_dot_product_attention(q, k, k.exp()), [z.floats("bcsd"), z.floats("bchd", 1)]),
    "attention, causal": of(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), "bcsd"),
    "inverse": of(lambda x: torch.linalg.inv(_square(x))),
    "determinant": of(lambda x: torch.linalg.det(_square(x))),
    "log-determinant": of(lambda x: torch.logdet(_square(x))),
    "solve": lambda z: (lambda x, v: torch.linalg.solve(_square(x), v), [z.floats("bsd"), z.floats("bdk", 1)]),
    "cholesky": of(lambda x: torch.linalg.cholesky(_square(x))),
    "QR": of(lambda x: torch.linalg.qr(_square(x)).R),
    "singular values": of(lambda x: torch.linalg.svdvals(_square(x))),
    "eigenvalues": of(lambda x: torch.linalg.eigvalsh(_square(x))),
    "pseudo-inverse": of(lambda x: torch.linalg.pinv(_square(x))),
    "matrix_exp": of(lambda x: torch.matrix_exp(0.1 * _square(x))),
    "matrix power": of(lambda x: torch.linalg.matrix_power(_square(x), 3)),
    "triangular solve": lambda z: (
        lambda x, v: torch.linalg.solve_triangular(_square(x).tril(), v, upper=False),
        [z.floats("bsd"), z.floats("bdk", 1)],
    ),
    "householder": of(lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) - x),
    "histogram": of(lambda x: x * torch.histc(x.detach(), 4, -2.0, 2.0).sum()),
    "bincount": _indexed(lambda x, i: x * torch.bincount(i, minlength=x.shape[-1])[: x.shape[-1]], "bd", "k", "d"),
    "unique": _indexed(lambda x, i: x * i.unique().sum(), "bd", "k", "d"),
    "nonzero": of(lambda x: x.sum() + (x > 0).nonzero().sum()),
    "masked_select": of(lambda x: x.masked_select(x > 0)),
}
