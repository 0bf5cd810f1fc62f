"""What is read by a mask and written under the same mask: values and gradients as torch's own, split like any other, else refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from tests.support.models.layer import MESH, X, assert_as_model, of


class Model(nn.Module):
    def __init__(self, write: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.row, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.outer(self.write(self, self.inner(x), labels).tanh()).square().mean()


def prompts(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """segment-anything."""
    x[labels == -1] = 0.0
    x[labels == -1] += model.row
    x[labels == 0] += model.row[None] * 2
    return x


def farthest(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """PointNet++: a mask of all dims."""
    distance, here = x * model.row, x.clone()
    mask = distance < here
    here[mask] = distance[mask]
    return here


def spline(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """VITS, and something inside as well."""
    inside = labels >= 0
    outputs = torch.zeros_like(x)
    outputs[~inside] = x[~inside]
    outputs[inside] = (x[inside] * model.row - 1).exp() / (x[inside].square() + model.scale)
    return outputs


def of_views(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """What is written is seen by other names; the mask is made twice."""
    x = x.clone()
    x[:, 1:][labels[:, 1:] == 0] = x[:, :-1][labels[:, 1:] == 0] * model.row
    x[labels == 1, 0] -= x[labels == 1, 1]
    return x


def of_choices(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A tensor without dims becomes what stands beside it (here 44), whatever the condition is."""
    mask, counts = labels >= 0, labels.to(torch.int8)
    weights = x[..., 0].clone()
    weights[mask] = torch.where(weights[mask] > 0.1, counts[mask], torch.tensor(300)).to(x.dtype)
    return x * weights[..., None]


def of_samples(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The mask covers the first dim alone."""
    x[labels[:, 0] == 0] *= model.row.expand(5, 4)
    return x


def one_after_another(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """What is read is a copy, and is itself written in place."""
    mask = labels == 1
    chosen = x[mask]
    x = x * 2
    chosen.mul_(model.row)
    chosen += model.scale
    x[mask] = chosen.relu().detach() + chosen
    with torch.no_grad():
        x[mask] = x[mask] * 0.5 + model.scale
    return x


def added(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels == 0
    return x.index_put((mask,), x[mask] + 1).index_put((mask,), x[mask] * model.row, accumulate=True)


def of_integers(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[labels < 0] += 7
    is_odd = labels > 1
    is_odd[labels == 1] = ~is_odd[labels == 1]
    return x * labels[..., None] * is_odd[..., None]


def of_bits(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    mask, is_kept, codes = labels == 1, labels > 0, labels + 1
    is_kept[mask] &= False
    is_kept[labels < 0] |= (x[..., 0] > 0)[labels < 0]
    codes[mask] |= 4
    codes[mask] >>= 1
    codes[labels == 0] = codes[labels == 0] & 3 | 8
    return x * is_kept[..., None] * codes[..., None]


def across_no_grad(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Read under it and written outside, and the other way round."""
    mask = labels == 1
    with torch.no_grad():
        scale = x[mask].abs() + 1
    x[mask] = x[mask] * model.row / scale
    chosen = x[labels == 0] * model.scale
    with torch.no_grad():
        x[labels == 0] = chosen
    return x


def of_wider_numbers(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A tensor without dims makes nothing wider, nor of another kind than its own."""
    x = x.float()
    x[labels == 1] *= model.scale.double()
    labels = labels.clone()
    labels[labels == 0] = (labels[labels == 0] + model.scale.double() * 9).long()
    return (x * labels[..., None]).to(model.row.dtype)


def columns(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Dims before those of the mask; it is made of the parameters."""
    mask = model.row > 0
    x[..., mask] += x[..., mask] * model.scale + torch.arange(8.0, dtype=x.dtype).view(8, 1, 1)
    return x


# Of these a good part is computed of labels alone, which have no width for tp.
OF_LABELS = (of_views, of_integers, of_bits, of_wider_numbers, of_choices)
MODELS = (prompts, farthest, spline, of_samples, one_after_another, added, columns, across_no_grad, *OF_LABELS)


def batch(labels: int | None = None) -> dict[str, Tensor]:
    """The labels are drawn, or all are this one."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(-1, 2, (8, 5), generator=draw)
    return {"x": torch.randn(8, 5, 4, generator=draw), "labels": drawn if labels is None else torch.full_like(drawn, labels)}


@pytest.mark.parametrize("write", MODELS)
def test_exact_and_split(write: Any) -> None:
    parallel = autopar.compile(Model(write), autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch(), backend="eager")
    for given in (batch(), batch(-1), batch(0), batch(1)):  # some are true, none, all
        report = parallel.verify(**given, promote=True)
        assert report, report
    assert write in OF_LABELS or "no rank repeats another's work" in parallel.explain()


@pytest.mark.parametrize("axes, options", [({"pp": 2, "dp": 2}, {"num_microbatches": 2}), ({"dp": 2}, {"zero": 3})], ids=["pp", "zero"])
@pytest.mark.parametrize("write", [prompts, spline, one_after_another])
def test_in_microbatches_and_in_parts(write: Any, axes: dict[str, int], options: dict[str, Any]) -> None:
    parallel = autopar.compile(Model(write), autopar.virtual_mesh(**axes), example_inputs=batch(), backend="eager", **options)
    report = parallel.verify(**batch(), promote=True)
    assert report, report


def test_on_the_default_backend() -> None:
    parallel = autopar.compile(Model(prompts), autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch())
    assert parallel.verify(**batch())


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        parallel = autopar.compile(Model(prompts), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
        assert parallel.verify(**batch())


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1.0])
def test_nothing_gets_out_of_where_the_mask_is_false(bad: float) -> None:
    """Neither a value nor a gradient, of what is read (of -1 the root is none) and of what is made of the zeros that stand there."""

    def write(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels == 0
        read = torch.where(mask[..., None], x.exp(), bad)
        found = x.clone()
        found[mask] = read[mask].sqrt().log() * model.row / read[mask]
        return found

    assert_as_model(Model(write), tuple(batch().values()), {})


def test_of_an_empty_mask_nothing_is_computed() -> None:
    """Of no row the gradient is 0, though what is computed of zeros has none that is finite."""

    def write(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        x[labels == 7] = x[labels == 7] * (model.row + math.inf) / (model.scale - model.scale)
        return x

    assert_as_model(Model(write), tuple(batch().values()), {})


def of_another_mask(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    y[x[:, 1] > 0] = y[x[:, 0] > 0]
    return y.sum()


def of_a_mask_rewritten(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    chosen = y[mask]
    mask[2:].logical_not_()
    y[mask] = chosen
    return y.sum()


def of_a_condition_rewritten(layer: Any, x: Tensor) -> Tensor:
    y, column = layer.linear(x), x[:, 0].clone()
    chosen = y[column > 0]
    column[2:].neg_()
    y[column > 0] = chosen
    return y.sum()


def of_a_draw(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    y[torch.rand(8) < 0.5] = y[torch.rand(8) < 0.5]
    return y.sum()


def of_its_length(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    y[mask] *= y[mask].shape[0]
    return y.sum()


def of_other_rows(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    y[mask] = y[mask].cumsum(0)
    return y.sum()


def of_drawn_rows(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    y[mask] = torch.dropout(y[mask], 0.5, True)
    return y.sum()


def of_whole_divisors(layer: Any, x: Tensor) -> Tensor:
    counts, mask = x.long(), x[:, 0] > 0
    counts[mask] = 7 % counts[mask]
    return (layer.linear(x) * counts).sum()


def of_a_branch(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    if y[mask].numel() > 0:
        y[mask] += 1
    return y.sum()


def of_the_output(layer: Any, x: Tensor) -> Any:
    y, mask = layer.linear(x), x[:, 0] > 0
    return y.sum(), y[mask] + 1


def of_a_mask_inside(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    chosen = y[mask]
    chosen[chosen > 0] = 1.0
    y[mask] = chosen
    return y.sum()


def of_a_list_rewritten(layer: Any, x: Tensor) -> Tensor:
    y, column = layer.linear(x), x[:, 0].clone()
    chosen = y[torch.stack([column, column]).sum(0) > 0]
    column[2:].neg_()
    y[torch.stack([column, column]).sum(0) > 0] = chosen
    return y.sum()


def of_an_op_that_wants_sizes(layer: Any, x: Tensor) -> Tensor:
    y, mask = layer.linear(x), x[:, 0] > 0
    y[mask] = torch.addcdiv(y[mask], y[mask], layer.linear.bias)
    return y.sum()


REFUSED = [
    of_another_mask, of_a_mask_rewritten, of_a_condition_rewritten, of_a_draw, of_its_length, of_other_rows, of_drawn_rows,
    of_whole_divisors, of_a_branch, of_the_output, of_a_mask_inside, of_a_list_rewritten, of_an_op_that_wants_sizes,
]  # fmt: skip


@pytest.mark.parametrize("compute", REFUSED)
def test_what_is_of_a_size_that_depends_on_values_is_refused(compute: Any) -> None:
    first = compute.__code__.co_firstlineno
    with pytest.raises(CaptureError, match="the size of a result depends on values") as caught:
        of(compute, X)
    where, mend = str(caught.value).splitlines()[1:3]
    line = int(where.partition(f"{__file__}:")[2].split()[0])
    assert where.startswith("  where: ") and first < line < first + 7, where
    assert mend.startswith("  how to mend it: ") and "torch.where(mask[..., None]" in mend, mend


def test_where_it_is_read_is_told_though_it_is_used_further_down() -> None:
    def late(layer: Any, x: Tensor) -> Tensor:
        chosen = layer.linear(x)[x[:, 0] > 0]
        larger = chosen + 1
        return larger.mean()

    with pytest.raises(CaptureError, match=r"where: .*chosen = layer\.linear\(x\)\[x\[:, 0\] > 0\]"):
        of(late, X)


def test_the_program_has_no_size_that_depends_on_values() -> None:
    program = capture(Model(spline), (), batch(), MESH)
    assert not any("index" in str(node.target) or "sym" in str(node.target) for node in program.graph.nodes)


def test_a_number_makes_nothing_wider() -> None:
    def write(model: Model, x: Tensor, labels: Tensor) -> Tensor:
        x[labels == 0] = x[labels == 0] * model.scale.double()
        return x

    products = [node for node in capture(Model(write), (), batch(), MESH).graph.nodes if "aten.mul" in str(node.target)]
    assert products and all(node.meta["val"].dtype == torch.float32 for node in products)
