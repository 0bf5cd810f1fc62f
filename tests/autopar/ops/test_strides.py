"""No layout of a rank's operands changes what an op computes: every op that reads memory, on strided operands against contiguous ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from autopar.ir.mesh import Mesh
from autopar.ir.program import operands
from autopar.ops.localise import LocalBuilder, localise
from autopar.ops.strategies import build, space_of, strategies_of
from autopar.ops.strides import honours_strides
from autopar.testing.prove import instance, prove_strategy
from tests.support.op_instances import INSTANCES, built

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
MESH = Mesh((("x", 2),))


def with_gaps(x: Tensor) -> Tensor:
    """Every second element of each row."""
    return torch.stack((x, x), -1)[..., 0] if x.dim() else x


def turned(x: Tensor) -> Tensor:
    """The first dim lies innermost."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x


def swapped(x: Tensor) -> Tensor:
    """The last two dims lie the other way round."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


LAYOUTS = (with_gaps, turned, swapped)


@pytest.mark.parametrize("name", INSTANCES)
def test_ops_with_rules_are_exact_in_any_layout(name: str) -> None:
    """Whole, as contiguous operands, against two parts of other strides."""
    node = built(name)
    for layout in LAYOUTS:
        assert prove_strategy(node, random.Random(0).choice(strategies_of(node, MESH)), MESH, layout=layout) == []


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int, below: int = 4) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def positive_definite(size: int) -> Tensor:
    return drawn(size, size) @ drawn(size, size).T + torch.eye(size, dtype=torch.float64)


ROWS, LINE, PLANE, SPACE = drawn(4, 6), drawn(2, 4, 12), drawn(2, 4, 8, 12), drawn(2, 4, 6, 8, 10)
# Without these libraries' own state: (indices, offsets of bags, what each index belongs to, how many each bag has).
BAG = (ids(6), torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([2, 1, 3]))
QUERY, LOG_SUM_EXP = drawn(2, 4, 6, 8), drawn(2, 4, 6).exp()

# Backward ops, and ops that read indices: (op, arguments).
OTHERS: dict[str, tuple[Any, ...]] = {
    "weight norm": (aten._weight_norm_interface.default, ROWS, drawn(4, 1), 0),
    "weight norm backward": (
        aten._weight_norm_interface_backward.default,
        drawn(4, 6),
        ROWS,
        drawn(4, 1),
        ROWS.norm(dim=1, keepdim=True),
        0,
    ),
    "max pool": (aten.max_pool2d_with_indices.default, PLANE, [2, 2]),
    "max pool backward": (
        aten.max_pool2d_with_indices_backward.default,
        *(drawn(2, 4, 4, 6), PLANE, [2, 2], [2, 2], [0, 0], [1, 1], False, ids(2, 4, 4, 6, below=96)),
    ),
    "max pool in space": (aten.max_pool3d_with_indices.default, SPACE, [2, 2, 2]),
    "max pool in space backward": (
        aten.max_pool3d_with_indices_backward.default,
        *(drawn(2, 4, 3, 4, 5), SPACE, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, ids(2, 4, 3, 4, 5, below=480)),
    ),
    "adaptive max pool": (aten.adaptive_max_pool2d.default, PLANE, [4, 4]),
    "adaptive max pool backward": (aten.adaptive_max_pool2d_backward.default, drawn(2, 4, 4, 4), PLANE, ids(2, 4, 4, 4, below=96)),
    "adaptive max pool in space": (aten.adaptive_max_pool3d.default, SPACE, [3, 4, 5]),
    "adaptive max pool in space backward": (
        aten.adaptive_max_pool3d_backward.default,
        *(drawn(2, 4, 3, 4, 5), SPACE, ids(2, 4, 3, 4, 5, below=480)),
    ),
    "fractional pool backward": (
        aten.fractional_max_pool2d_backward.default,
        *(drawn(2, 4, 3, 4), PLANE, [2, 2], [3, 4], ids(2, 4, 3, 4, below=96)),
    ),
    "fractional pool in space backward": (
        aten.fractional_max_pool3d_backward.default,
        *(drawn(2, 4, 3, 4, 5), SPACE, [2] * 3, [3, 4, 5], ids(2, 4, 3, 4, 5, below=480)),
    ),
    "mean pool": (aten.avg_pool2d.default, PLANE, [2, 2]),
    "mean pool backward": (aten.avg_pool2d_backward.default, drawn(2, 4, 4, 6), PLANE, [2, 2], [2, 2], [0, 0], False, True, None),
    "mean pool in space backward": (
        aten.avg_pool3d_backward.default,
        *(drawn(2, 4, 3, 4, 5), SPACE, [2] * 3, [2] * 3, [0] * 3, False, True, None),
    ),
    "adaptive mean pool": (aten._adaptive_avg_pool2d.default, PLANE, [4, 4]),
    "adaptive mean pool backward": (aten._adaptive_avg_pool2d_backward.default, drawn(2, 4, 4, 4), PLANE),
    "adaptive mean pool in space backward": (aten._adaptive_avg_pool3d_backward.default, drawn(2, 4, 3, 4, 5), SPACE),
    "nearest backward": (aten.upsample_nearest2d_backward.default, drawn(2, 4, 16, 24), [16, 24], [2, 4, 8, 12]),
    "linear backward": (aten.upsample_linear1d_backward.default, drawn(2, 4, 24), [24], [2, 4, 12], False),
    "bilinear": (aten.upsample_bilinear2d.vec, PLANE, [16, 24], False, None),
    "bilinear backward": (aten.upsample_bilinear2d_backward.default, drawn(2, 4, 16, 24), [16, 24], [2, 4, 8, 12], False),
    "bicubic backward": (aten.upsample_bicubic2d_backward.default, drawn(2, 4, 16, 24), [16, 24], [2, 4, 8, 12], False),
    "trilinear backward": (aten.upsample_trilinear3d_backward.default, drawn(2, 4, 12, 16, 20), [12, 16, 20], [2, 4, 6, 8, 10], False),
    "reflection backward": (aten.reflection_pad2d_backward.default, drawn(2, 4, 10, 14), PLANE, [1] * 4),
    "reflection of lines backward": (aten.reflection_pad1d_backward.default, drawn(2, 4, 14), LINE, [1, 1]),
    "replication backward": (aten.replication_pad3d_backward.default, drawn(2, 4, 8, 10, 12), SPACE, [1] * 6),
    "pixel shuffle": (aten.pixel_shuffle.default, PLANE, 2),
    "unfold": (aten.im2col.default, PLANE, [2, 2], [1, 1], [0, 0], [2, 2]),
    "fold": (aten.col2im.default, drawn(2, 16, 24), [8, 12], [2, 2], [1, 1], [0, 0], [2, 2]),
    "unfold backward": (aten.unfold_backward.default, drawn(2, 4, 6, 2), [2, 4, 12], 2, 2, 2),
    "distances": (aten._cdist_forward.default, ROWS, drawn(5, 6), 2.0, None),
    "distances backward": (aten._cdist_backward.default, drawn(4, 5), ROWS, drawn(5, 6), 1.0, drawn(4, 5).abs()),
    "pairs": (aten._pdist_forward.default, ROWS, 2.0),
    "pairs backward": (aten._pdist_backward.default, drawn(6), ROWS, 2.0, drawn(6).abs()),
    "grid": (aten.grid_sampler_2d.default, PLANE, drawn(2, 5, 7, 2), 0, 0, False),
    "grid backward": (aten.grid_sampler_2d_backward.default, drawn(2, 4, 5, 7), PLANE, drawn(2, 5, 7, 2), 0, 0, False, [True, True]),
    "sort": (aten.sort.default, LINE, 1),
    "median": (aten.median.dim, LINE, 1),
    "cumulative maximum": (aten.cummax.default, LINE, 1),
    "cumulative logsumexp": (aten.logcumsumexp.default, LINE, 1),
    "frequencies": (aten._fft_r2c.default, LINE, [2], 0, True),
    "margin": (aten.multi_margin_loss.default, ROWS, ids(4)),
    "margin backward": (aten.multi_margin_loss_backward.default, drawn(), ROWS, ids(4), 1, 1.0),
    "labels' margin": (aten.multilabel_margin_loss_forward.default, ROWS, ids(4, 6), 1),
    "nll": (aten.nll_loss_forward.default, ROWS, ids(4), None, 1, -100),
    "nll backward": (aten.nll_loss_backward.default, drawn(), ROWS, ids(4), None, 1, -100, torch.tensor(4.0, dtype=torch.float64)),
    "nll of planes backward": (
        aten.nll_loss2d_backward.default,
        *(drawn(2, 8, 12), PLANE, ids(2, 8, 12), None, 0, -100, torch.tensor(0.0, dtype=torch.float64)),
    ),
    "bag": (aten._embedding_bag.default, drawn(10, 8), *BAG[:2], False, 0, False, None, True, -1),
    "bag, forward": (aten._embedding_bag_forward_only.default, drawn(10, 8), *BAG[:2], False, 0),
    "bag backward": (
        aten._embedding_bag_dense_backward.default,
        *(drawn(3, 8), BAG[0], BAG[2], BAG[3], torch.tensor([1, 2, 5]), 10, False, 1, None, -1),
    ),
    "bag's weights backward": (
        aten._embedding_bag_per_sample_weights_backward.default,
        *(drawn(3, 8), drawn(10, 8), BAG[0], BAG[1], BAG[2], 0, -1),
    ),
    "batch norm backward": (
        aten.native_batch_norm_backward.default,
        *(PLANE, drawn(2, 4, 8, 12), drawn(4), None, None, drawn(4), drawn(4).abs(), True, 1e-5, [True] * 3),
    ),
    "attention on CPU": (aten._scaled_dot_product_flash_attention_for_cpu.default, QUERY, QUERY, QUERY),
    "attention on CPU backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(QUERY, QUERY, QUERY, QUERY, QUERY, LOG_SUM_EXP, 0.0, False),
    ),
    "prelu backward": (aten._prelu_kernel_backward.default, LINE, LINE, drawn(1, 4, 1)),
    "rrelu backward": (aten.rrelu_with_noise_backward.default, LINE, LINE, LINE, 0.1, 0.3, False, False),
    "take": (aten.take.default, LINE, ids(4, 3)),
    "search": (aten.searchsorted.Tensor, LINE.sort(-1).values, LINE),
    "scatter by mask": (aten.masked_scatter.default, LINE, LINE > 0, LINE),
    "cholesky": (aten.linalg_cholesky_ex.default, positive_definite(4)),
    "inverse": (aten.linalg_inv_ex.default, positive_definite(4)),
    "kronecker": (aten.kron.default, ROWS, drawn(2, 3)),
    "complex pairs": (aten.view_as_complex.default, drawn(4, 6, 2)),
}


def ran(node: Node, values: tuple[Tensor, ...], layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What one rank computes that has all of every operand, laid out in this way."""
    builder = LocalBuilder(Graph())
    inputs = [builder.placeholder("operand", value.shape, value.dtype) for value in values]
    with builder.mode:
        for each in inputs:
            each.meta["val"] = layout(each.meta["val"])
    replicated = build(space_of(node), [("x", None)], MESH)
    builder.graph.output(localise(node, replicated, tuple(inputs), builder, MESH))
    result = Interpreter(torch.nn.Module(), graph=builder.graph).run(*map(layout, values))
    return [value for value in (result if isinstance(result, (tuple, list)) else (result,)) if value is not None]


@pytest.mark.parametrize("name", OTHERS)
def test_ops_that_read_memory_are_exact_in_any_layout(name: str) -> None:
    target, *args = OTHERS[name]
    node = instance(target, *args)
    values = tuple(each for each in args if isinstance(each, Tensor))
    assert len(values) == len(operands(node))
    wanted = ran(node, values, torch.Tensor.contiguous)
    for layout in LAYOUTS:
        for got, want in zip(ran(node, values, layout), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", ["weight norm backward", "adaptive max pool in space backward", "bag", "attention on CPU"])
def test_some_kernels_do_not_look(name: str) -> None:
    """What the table in `autopar/ops/strides.py` is for: these are wrong, or raise, when they get what lies otherwise."""
    target, *args = OTHERS[name]
    contiguous = target(*args)

    def differs(layout: Callable[[Tensor], Tensor]) -> bool:
        try:
            got = target(*[layout(each) if isinstance(each, Tensor) else each for each in args])
        except RuntimeError:
            return True
        pairs = zip(*((found if isinstance(found, tuple) else (found,)) for found in (got, contiguous)), strict=True)
        return any(isinstance(a, Tensor) and a.numel() > 0 and not torch.allclose(a, b, equal_nan=True) for a, b in pairs)

    assert any(map(differs, LAYOUTS)) and not honours_strides(target)


def test_operands_that_lie_as_wanted_are_not_copied() -> None:
    target, *args = OTHERS["max pool backward"]
    builder, node = LocalBuilder(Graph()), instance(target, *args)
    inputs = tuple(builder.placeholder("operand", value.shape, value.dtype) for value in args if isinstance(value, Tensor))
    localise(node, build(space_of(node), [("x", None)], MESH), inputs, builder, MESH)
    assert [each.target for each in builder.graph.nodes if each.op == "call_function"] == [target]


def test_products_take_transposed_operands() -> None:
    assert all(map(honours_strides, (aten.mm.default, aten.add.Tensor, aten.transpose.int, torch.ops.autopar.attention.default)))
