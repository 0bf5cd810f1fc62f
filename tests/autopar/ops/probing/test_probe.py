"""Rules inferred by running an op: what must be found, and what must not be claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ops.lookup import rule_of
from autopar.ops.probing.probe import infer
from autopar.ops.rule import Rule
from autopar.ops.strategies import factors_of
from autopar.testing.prove import instance, prove

X = torch.empty(8, 16, 24)
LIBRARY = "autopar_probe_test"


def operator_of(function: Callable[..., Any]) -> Any:
    """`function` as a custom op that nobody has a rule for."""
    name = function.__name__
    if not hasattr(getattr(torch.ops, LIBRARY), name):
        torch.library.custom_op(f"{LIBRARY}::{name}", function, mutates_args=()).register_fake(function)
    return getattr(getattr(torch.ops, LIBRARY), name).default


def found(function: Callable[..., Any], *args: Any) -> str:
    """The rule as an equation, dims named by first appearance; "" for none. What is found is proved at the true sizes, too."""
    node = instance(operator_of(function), *args)
    rule = rule_of(node)
    assert prove(node) == []
    return equation(rule) if rule is not None else ""


def equation(rule: Rule) -> str:
    """`ab,b->ab`; a label reduced by a maximum is a capital, a dim that cannot be split a dot."""
    assert rule.inferred and not rule.linear and not rule.view
    names: dict[Any, str] = {None: "."}

    def text(terms: tuple[Any, ...]) -> str:
        for label in (label for term in terms for label in term if label not in names):
            letter = "abcdefgh"[len(names) - 1]
            names[label] = letter.upper() if rule.reductions.get(label) == "max" else letter
        return ",".join("".join(names[label] for label in term) for term in terms)

    return f"{text(rule.operands)}->{text(rule.results)}"


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x + bias)


def normalise_rows(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def layer_norm(x: Tensor, shape: list[int]) -> Tensor:
    return torch.nn.functional.layer_norm(x, shape)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def product_and_maximum(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x @ weight, x.amax(0)


def sum_over(x: Tensor, count: int) -> Tensor:
    return x.sum(0) / count


def logarithm(x: Tensor) -> Tensor:
    return x.log()


def three_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = x.chunk(3, -1)
    return first.clone(), second.clone(), third.clone()


def softmax_in_float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.softmax(-1)


def embed(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


FOUND = [
    (bias_gelu, (X, torch.empty(24)), "abc,c->abc"),
    (normalise_rows, (X,), "ab.->ab."),
    (layer_norm, (X, [24]), "ab.->ab."),
    (layer_norm, (X, [16, 24]), "a..->a.."),
    (product, (torch.empty(8, 16), torch.empty(16, 24)), "ab,bc->ac"),
    (product, (torch.empty(8, 8), torch.empty(8, 8)), "ab,bc->ac"),
    (product_and_maximum, (torch.empty(8, 16), torch.empty(16, 24)), "Ab,b.->A.,b"),
    (sum_over, (X, 8), "abc->bc"),
    (logarithm, (X,), "abc->abc"),
    (three_parts, (X,), "ab.->ab.,ab.,ab."),
    (embed, (torch.empty(24, 8), torch.empty(4, 6, dtype=torch.int64)), ".a,bc->bca"),
]


@pytest.mark.parametrize(
    ("function", "args", "want"), FOUND, ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else "")
)
def test_found(function: Callable[..., Any], args: tuple[Any, ...], want: str) -> None:
    assert found(function, *args) == want


def test_an_op_that_takes_its_own_dtype_only_is_run_in_that() -> None:
    rule = infer(instance(operator_of(softmax_in_float32), X))
    assert rule is not None and equation(rule) == "ab.->ab."


def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(1)


def sorted_rows(x: Tensor) -> Tensor:
    return x.sort(1).values


def softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def flipped(x: Tensor) -> Tensor:
    return x.flip(1)


def lower_triangle(x: Tensor) -> Tensor:
    return x.tril()


def rotary(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[1], dtype=x.dtype).cos()[None, :, None]


def first_rows(x: Tensor, count: int) -> Tensor:
    return x * (torch.arange(x.shape[1]) < count)[None, :, None]


def first_five_rows(x: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1]) < 5)[None, :, None]


def first_forty_rows(x: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1]) < 40)[None, :, None]


def blocks(x: Tensor) -> Tensor:
    block = 8 if x.shape[1] % 8 == 0 else x.shape[1]
    scaled = x.reshape(x.shape[0], -1, block, x.shape[2])
    return (scaled / scaled.abs().amax(2, keepdim=True)).reshape(x.shape)


def pairs(x: Tensor) -> Tensor:
    apart = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2])
    return (apart + apart.flip(2)).reshape(x.shape)


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([-second, first], 1)


def divided_by_length(x: Tensor) -> Tensor:
    return x / x.shape[1]


def counted(x: Tensor, ids: Tensor) -> Tensor:
    return x + ids.cumsum(0).to(x.dtype)[None, :, None]


MEETING = (cumulative, sorted_rows, softmax, flipped, rotary, first_five_rows, blocks, pairs, halves, divided_by_length)
BOUNDS = (5, 12, 3000)


@pytest.mark.parametrize(
    ("function", "args"),
    [(function, ()) for function in MEETING] + [(first_rows, (bound,)) for bound in BOUNDS],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_dim_along_which_elements_meet_is_not_split(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert found(function, X, *args) == "a.b->a.b"


def test_a_bound_that_is_the_size_itself_may_be_split() -> None:
    """At these literals the op is pointwise; it would not be with another bound."""
    assert found(first_rows, X, 16) == "abc->abc"


def test_what_small_operands_do_not_show_the_larger_ones_do() -> None:
    assert found(first_forty_rows, torch.empty(8, 64, 24)) == "a.b->a.b"


def test_no_claim_where_positions_or_counts_matter() -> None:
    assert found(lower_triangle, X) == "a..->a.."
    assert found(counted, X, torch.empty(16, dtype=torch.int64)) == "a.b,.->a.b"


def shares_of_bags(x: Tensor, bags: Tensor, counts: Tensor) -> Tensor:
    """What the gradient of a bag's mean is to each of its words."""
    return x[bags] / counts.clamp(min=1)[bags].unsqueeze(1)


BAGS = torch.empty(6, dtype=torch.int64)


@pytest.mark.parametrize("width", [8, 16])
def test_dims_of_one_size_by_chance_do_not_walk_together(width: int) -> None:
    """As many bags as features; counts that are 0 or 1 divide by nothing, and whatever part of them is read gives the same."""
    counts = torch.empty(8, dtype=torch.int64)
    assert found(shares_of_bags, torch.empty(8, width), BAGS, counts) == ".a,b,.->ba"


@pytest.mark.parametrize("mode", [0, 1])
def test_the_gradient_of_bags_reads_the_sizes_of_all_bags(mode: int) -> None:
    """(gradient, indices, bag of each, sizes of bags, largest, number of weights, scaled, mode, sparse, weights, padding)"""
    eight = torch.empty(8, dtype=torch.int64)
    args = (torch.empty(8, 8), eight, eight, eight, eight, 8, False, mode, None, -1)
    node = instance(torch.ops.aten._embedding_bag_dense_backward.default, *args)
    rule = rule_of(node)
    assert rule is not None and equation(rule) == ".a,b,b,.,.->.a" and prove(node) == []


def mean_over_samples(x: Tensor) -> Tensor:
    return x.mean(0)


def clipped_sum(x: Tensor) -> Tensor:
    return x.sum(0).clamp(max=50.0)


def biased_sum(x: Tensor, bias: Tensor) -> Tensor:
    return x.sum(0) + bias


def test_only_plain_sums_are_unreduced() -> None:
    assert found(mean_over_samples, X) == ".ab->ab"
    assert found(clipped_sum, X) == ".ab->ab"
    assert found(biased_sum, X, torch.empty(16, 24)) == ".ab,ab->ab"


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


CALLS = []


def stateful(x: Tensor) -> Tensor:
    CALLS.append(x)
    return x + len(CALLS)


def writes(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


def reshaped(x: Tensor, shape: list[int]) -> Tensor:
    return (2 * x).reshape(shape)


def failing(x: Tensor) -> Tensor:
    if x.shape[0] % 128:
        raise ValueError("rows must be a multiple of 128")
    return x + 1


@pytest.mark.parametrize(
    ("function", "args"),
    [(noise, (X,)), (stateful, (X,)), (writes, (X,)), (reshaped, (X, [8, 16 * 24])), (failing, (torch.empty(128, 4),))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ops_that_are_random_keep_a_state_write_or_fail_have_no_rule(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    node = instance(operator_of(function), *args)
    assert infer(node) is None and rule_of(node) is None and factors_of(node) == ()


def test_registered_rules_come_first_and_random_ops_get_none() -> None:
    rule = rule_of(instance(torch.ops.aten.exp.default, X))
    assert rule is not None and not rule.inferred
    assert infer(instance(torch.ops.aten.bernoulli.p, X, 0.5)) is None


def test_the_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    assert found(normalise_rows, torch.empty(4, 10)) == "a.->a."
    assert torch.equal(before, torch.get_rng_state())


def test_a_rule_is_inferred_once() -> None:
    first, second = (rule_of(instance(operator_of(normalise_rows), X)) for _ in range(2))
    assert first is second


class Custom(nn.Module):
    """Two layers around an op without a rule and with a backward that is one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32, bias=False), nn.Linear(32, 4)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.last(torch.ops.autopar_probe_test.scaled_silu(self.first(x), self.bias)) - y) ** 2).mean()


def scaled_silu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.silu(x) * bias


def scaled_silu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gate = x.sigmoid()
    return gradient * bias * gate * (1 + x * (1 - gate)), (gradient * x * gate).sum(0)


def test_a_model_with_a_custom_op_splits_and_is_exact() -> None:
    operator_of(scaled_silu), operator_of(scaled_silu_backward)
    torch.library.register_autograd(
        f"{LIBRARY}::scaled_silu",
        lambda ctx, gradient: torch.ops.autopar_probe_test.scaled_silu_backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16).double(), "y": torch.randn(8, 4).double()}
    parallel = autopar.compile(Custom().double(), autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch, backend="eager")
    report = parallel.verify(**batch)
    assert report and report.worst <= 1e-9, str(report)
    summary = parallel.summary()
    assert summary["flops_split"] == 1.0
    assert not [entry for entry in summary["replicated"] if "scaled_silu" in entry["op"]]
