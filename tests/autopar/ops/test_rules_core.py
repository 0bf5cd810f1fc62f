"""The whole core ATen op set has rules, each proved on an instance: whole against parts, factor by factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ops.lookup import rule_of
from autopar.ops.rule import RULES
from autopar.ops.strategies import factors_of
from autopar.testing.prove import instance, prove
from tests.support.op_instances import INSTANCES

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
X, Y, ROW, SQUARE = torch.empty(4, 6), torch.empty(4, 6), torch.empty(6), torch.empty(4, 6, 6)
SEQUENCE, IMAGE, VOLUME = torch.empty(4, 6, 9), torch.empty(4, 6, 8, 8), torch.empty(2, 4, 4, 6, 8)
IDS, FLAGS, INDICES = torch.empty(4, 6, dtype=torch.int64), torch.empty(4, 6, dtype=torch.bool), torch.empty(3, dtype=torch.int64)
COMPLEX = torch.empty(4, 6, 5, dtype=torch.complex64)

# Core ops without a rule, which run replicated or never get so far, and why.
EXCEPTIONS = {
    "sym_size.int": "shapes are static: it is no node of a captured graph",
    "sym_stride.int": "shapes are static",
    "sym_numel": "shapes are static",
    "sym_storage_offset": "shapes are static",
    "sym_is_contiguous": "shapes are static",
    "_local_scalar_dense": "reads a value of a tensor: capture refuses it",
    "nonzero": "its shape depends on values: capture refuses it",
    "rand": "random: keyed by position before it gets here",
    "randn": "random: keyed by position before it gets here",
    "randperm": "random",
    "native_dropout": "random: keyed by position before it gets here",
    "resize_": "writes: graphs are functional",
    "_native_batch_norm_legit": "writes: graphs have the functional overload",
    "as_strided": "addresses memory: a part of the operand has other strides",
    "empty_strided": "its strides are literals",
    "masked_scatter": "each element's source is counted over the whole mask",
    "_pdist_forward": "pairs of rows of one operand: no dim of the result is one of the operand",
    "_embedding_bag": "what its further results say of the bags is the same on every rank of a split of columns, which no label says",
}
MORE: dict[str, tuple[Any, ...]] = {
    "average pooling of a sequence": (aten.avg_pool1d.default, (SEQUENCE, [3])),
    "average pooling of a volume": (aten.avg_pool3d.default, (VOLUME, [2, 2, 2])),
    "average pooling, backward": (
        aten.avg_pool2d_backward.default,
        (torch.empty(4, 6, 4, 4), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    "pooling to a size": (aten._adaptive_avg_pool2d.default, (IMAGE, [2, 2])),
    "pooling to a length": (aten.adaptive_avg_pool1d.default, (SEQUENCE, [3])),
    "pooling of a volume to a size": (aten._adaptive_avg_pool3d.default, (VOLUME, [2, 2, 2])),
    "pooling to a size, backward": (aten._adaptive_avg_pool2d_backward.default, (torch.empty(4, 6, 2, 2), IMAGE)),
    "max pooling of a volume": (aten.max_pool3d_with_indices.default, (VOLUME, [2, 2, 2])),
    "max pooling, backward": (
        aten.max_pool2d_with_indices_backward.default,
        (torch.empty(4, 6, 4, 4), IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, torch.empty(4, 6, 4, 4, dtype=torch.int64)),
    ),
    "reflection of a sequence": (aten.reflection_pad1d.default, (SEQUENCE, [2, 1])),
    "reflection": (aten.reflection_pad2d.default, (IMAGE, [1, 1, 2, 2])),
    "reflection of a volume": (aten.reflection_pad3d.default, (VOLUME, [1, 1, 2, 2, 1, 1])),
    "reflection, backward": (aten.reflection_pad2d_backward.default, (torch.empty(4, 6, 12, 10), IMAGE, [1, 1, 2, 2])),
    "replication": (aten.replication_pad2d.default, (IMAGE, [1, 1, 2, 2])),
    "replication of a volume": (aten.replication_pad3d.default, (VOLUME, [1, 1, 2, 2, 1, 1])),
    "nearest": (aten.upsample_nearest2d.vec, (IMAGE, None, [2.0, 2.0])),
    "bilinear": (aten.upsample_bilinear2d.vec, (IMAGE, [16, 16], False, None)),
    "nearest, backward": (aten.upsample_nearest2d_backward.default, (torch.empty(4, 6, 16, 16), [16, 16], [4, 6, 8, 8])),
    "trilinear, backward": (
        aten.upsample_trilinear3d_backward.default,
        (torch.empty(2, 4, 8, 12, 16), [8, 12, 16], [2, 4, 4, 6, 8], False),
    ),
    "grid sample": (aten.grid_sampler_2d.default, (IMAGE, torch.empty(4, 10, 12, 2), 0, 0, False)),
    "grid sample, backward": (
        aten.grid_sampler_2d_backward.default,
        (torch.empty(4, 6, 10, 12), IMAGE, torch.empty(4, 10, 12, 2), 0, 0, False, [True, True]),
    ),
    "grid sample of a volume": (aten.grid_sampler_3d.default, (VOLUME, torch.empty(2, 4, 6, 8, 3), 0, 0, False)),
    "patches to columns": (aten.im2col.default, (IMAGE, [2, 2], [1, 1], [0, 0], [2, 2])),
    "columns to patches": (aten.col2im.default, (torch.empty(4, 24, 16), [8, 8], [2, 2], [1, 1], [0, 0], [2, 2])),
    "pixel shuffle": (aten.pixel_shuffle.default, (torch.empty(4, 12, 6, 8), 2)),
    "pixel unshuffle": (aten.pixel_unshuffle.default, (IMAGE, 2)),
    "distances": (aten._cdist_forward.default, (SQUARE, torch.empty(4, 8, 6), 2.0, None)),
    "distances, broadcast": (aten._cdist_forward.default, (torch.empty(1, 4, 6), torch.empty(3, 8, 6), 2.0, None)),
    "distances, backward": (aten._cdist_backward.default, (torch.empty(4, 6, 8), SQUARE, torch.empty(4, 8, 6), 2.0, torch.empty(4, 6, 8))),
    "fourier": (aten._fft_r2c.default, (SQUARE, [2], 0, True)),
    "fourier back": (aten._fft_c2r.default, (COMPLEX, [2], 0, 8)),
    "fourier, complex": (aten._fft_c2c.default, (COMPLEX, [1], 0, True)),
    "diagonal": (aten.diagonal.default, (SQUARE, 1, 1, 2)),
    "diagonal backward": (aten.diagonal_backward.default, (torch.empty(4, 5), [4, 6, 6], 1, 1, 2)),
    "diagonal matrix": (aten.diag_embed.default, (X,)),
    "diagonal scatter": (aten.diagonal_scatter.default, (SQUARE, X, 0, 1, 2)),
    "unfold backward": (aten.unfold_backward.default, (torch.empty(4, 3, 2), [4, 6], 1, 2, 2)),
    "split with sizes": (aten.split_with_sizes.default, (X, [2, 4], 1)),
    "unsafe split": (aten.unsafe_split.Tensor, (X, 2, 1)),
    "select scatter": (aten.select_scatter.default, (X, torch.empty(4), 1, 2)),
    "squeeze dims": (aten.squeeze.dims, (torch.empty(4, 1, 6, 1), [1, 3])),
    "max": (aten.max.dim, (X, 1)),
    "min": (aten.min.dim, (X, 1)),
    "amin": (aten.amin.default, (X, [1])),
    "argmin": (aten.argmin.default, (X, 1)),
    "extremes": (aten.aminmax.default, (X,), {"dim": 1}),
    "median": (aten.median.dim, (X, 1)),
    "k-th": (aten.kthvalue.default, (X, 2, 1)),
    "cumulative maximum": (aten.cummax.default, (X, 1)),
    "product": (aten.prod.dim_int, (X, 1)),
    "product of all": (aten.prod.default, (X,)),
    "any of all": (aten.any.default, (FLAGS,)),
    "any of dims": (aten.any.dims, (FLAGS, [1])),
    "mean of all": (aten.mean.default, (X,)),
    "variance of dims": (aten.var.correction, (SQUARE, [1, 2]), {"correction": 0}),
    "variance, older": (aten.var.dim, (SQUARE, [1, 2])),
    "deviation and mean": (aten.std_mean.correction, (SQUARE, [2])),
    "older norm": (aten.norm.ScalarOpt_dim, (SQUARE, 2, [1])),
    "sort": (aten.sort.default, (X, 1)),
    "log softmax": (aten._log_softmax.default, (X, 1, False)),
    "scatter": (aten.scatter.src, (X, 1, IDS, Y)),
    "scatter reduce": (aten.scatter_reduce.two, (X, 1, IDS, Y, "amax")),
    "scatter reduce by sum": (aten.scatter_reduce.two, (X, 1, IDS, Y, "sum")),
    "unsafe index": (aten._unsafe_index.Tensor, (SQUARE, [None, INDICES, None])),
    "index add": (aten.index_add.default, (X, 1, INDICES, torch.empty(4, 3))),
    "index copy": (aten.index_copy.default, (X, 1, torch.empty(1, dtype=torch.int64), torch.empty(4, 1))),
    "index fill": (aten.index_fill.int_Scalar, (X, 1, INDICES, 0.0)),
    "put by mask": (aten.index_put.default, (SQUARE, [None, torch.empty(6, 6, dtype=torch.bool)], torch.empty(()))),
    "batch norm without buffers": (aten._native_batch_norm_legit.no_stats, (IMAGE, ROW, ROW, True, 0.1, 1e-5)),
    "scalar": (aten.scalar_tensor.default, (2.0,)),
    "empty": (aten.empty.memory_format, ([4, 6],)),
    "copy": (aten.copy.default, (X, Y)),
    "fill": (aten.fill.Scalar, (X, 2.0)),
    "full like": (aten.full_like.default, (X, 2.0)),
    "alias": (aten.alias.default, (X,)),
    "clone": (aten.clone.default, (X,)),
    "hardswish": (aten.hardswish.default, (X,)),
    "elu backward": (aten.elu_backward.default, (X, 1.0, 1.0, 1.0, False, Y)),
    "clamp": (aten.clamp.default, (X, -0.5, 0.5)),
    "clamp by tensors": (aten.clamp.Tensor, (X, ROW, None)),
    "conjugate": (aten._conj.default, (COMPLEX,)),
    "cross product": (aten.linalg_cross.default, (torch.empty(4, 3, 6), torch.empty(1, 3, 6)), {"dim": 1}),
    "parametric relu": (aten._prelu_kernel.default, (X, torch.empty(1, 6))),
}
# What it holds is nobody's business.
UNDEFINED = {aten.empty.memory_format}


def core_ops() -> list[Any]:
    names = (name.removeprefix("aten::").split(".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    found = (getattr(getattr(aten, name[0]), name[1] if len(name) > 1 else "default", None) for name in names)
    return sorted((op for op in found if op is not None and torch.Tag.core in op.tags), key=str)


def name_of(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def is_pointwise(op: Any) -> bool:
    """Overloads that write into an operand are left to their functional twins, which graphs have."""
    return torch.Tag.pointwise in op.tags and not op._schema.is_mutable


def test_every_core_op_has_a_rule_that_is_proved() -> None:
    proved = {target for target, *_ in (*INSTANCES.values(), *MORE.values())}
    found = [name_of(op) for op in core_ops() if op not in proved and not is_pointwise(op) and torch.Tag.out not in op.tags]
    assert set(found) == set(EXCEPTIONS)


def test_exceptions_have_no_rule() -> None:
    registered = {str(target) for target in RULES}
    assert not [name for name in EXCEPTIONS if f"aten.{name}" in registered or f"aten.{name}.default" in registered]


@pytest.mark.parametrize("name", MORE)
def test_whole_equals_parts(name: str) -> None:
    target, args, *kwargs = MORE[name]
    node = instance(target, *args, **(kwargs[0] if kwargs else {}))
    rule = rule_of(node)
    assert rule is not None and not rule.inferred
    assert target in UNDEFINED or prove(node) == []


# Arguments of pointwise ops by the type in the schema.
SAMPLES = {"Tensor": X, "number": 2, "Optional[str]": "floor"}
POINTWISE = [op for op in core_ops() if is_pointwise(op) and op not in {target for target, *_ in (*INSTANCES.values(), *MORE.values())}]


@pytest.mark.parametrize("op", POINTWISE, ids=name_of)
def test_pointwise_ops(op: Any) -> None:
    samples = SAMPLES | ({"Tensor": IDS} if "bitwise" in str(op) else {})
    required = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    positional = [samples[str(argument.type)] for argument in required if not argument.kwarg_only]
    node = instance(op, *positional, **{argument.name: samples[str(argument.type)] for argument in required if argument.kwarg_only})
    assert {factor.name for factor in factors_of(node)} == {"d0", "d1"}
    assert prove(node) == []


# What must be found, beside what must be true.
FACTORS = {
    "pooling to a size": "d0 d1",
    "reflection": "d0 d1",
    "bilinear": "d0 d1",
    "grid sample": "n c p0 p1",
    "grid sample, backward": "n c p0 p1",
    "patches to columns": "d0 c",
    "columns to patches": "d0 c",
    "pixel shuffle": "d0 c h w",
    "pixel unshuffle": "d0 c h w",
    "distances": "d0 p r",
    "distances, backward": "d0 p r m",
    "fourier": "d0 d1",
    "diagonal": "d0",
    "index add": "d0",
    "put by mask": "d0 d1 d2",
    "scatter reduce": "d0",
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name: str) -> None:
    target, args, *kwargs = MORE[name]
    assert {factor.name for factor in factors_of(instance(target, *args, **(kwargs[0] if kwargs else {})))} == set(FACTORS[name].split())
