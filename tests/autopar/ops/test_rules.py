"""Every rule is proved: op instances run whole and in parts, factor by factor and linear set by linear set."""

import random

import pytest
import torch

from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.ops.lookup import rule_of
from autopar.ops.rule import RULES, Rule
from autopar.ops.rules.labels import is_zero
from autopar.ops.strategies import factors_of, strategies_of
from autopar.testing.prove import instance, prove, prove_strategy
from tests.support.captures import compiled
from tests.support.models.layer import Layer
from tests.support.op_instances import INSTANCES, built

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts(name: str) -> None:
    node = built(name)
    assert rule_of(node) is not None
    assert prove(node) == []


@pytest.mark.parametrize("name", INSTANCES)
def test_whole_equals_parts_on_two_axes(name: str) -> None:
    node, mesh = built(name), Mesh((("x", 2), ("y", 2)))
    strategies = strategies_of(node, mesh)
    for strategy in random.Random(0).sample(strategies, min(3, len(strategies))):
        assert prove_strategy(node, strategy, mesh) == []


# What must be found, beside what must be true: a rule that claims nothing is useless.
FACTORS = {
    "add": "d0 d1",
    "mm": "m k n",
    "bmm": "b m k n",
    "addmm": "m n",
    "sum": "d0 d1 d2",
    "mean": "d0 d2",
    "amax": "d0 d1 d2",
    "softmax": "d0 d1",
    "cat": "d0",
    "pad": "d0",
    "expand": "d1 d0 d2",
    "embedding": "v h i0 i1",
    "embedding backward": "i0 i1 h v",
    "embedding backward, scaled": "h",
    "index": "d0 d2 i0 i1",
    "gather": "d0 i v",
    "gather a part": "i v",
    "scatter add": "d0 v",
    "arange": "d0",
    "layer norm": "d0 d1",
    "layer norm backward": "d0 d1",
    "convolution": "n o",
    "convolution without bias": "n c o",
    "convolution in groups": "n g o",
    "convolution by channel": "n g",
    "convolution, transposed": "n g c o",
    "convolution of a sequence": "n c o",
    "convolution in groups, backward": "n g o",
    "convolution by channel, backward": "n g",
    "convolution, transposed, backward": "n g c o",
    "group norm": "n g",
    "group norm backward": "n g",
    "convolution backward": "n o",
    "convolution backward, no bias": "n o c",
    "attention": "b g r s",
    "attention, causal": "b g",
    "attention, window and soft cap": "b g r",
    "attention backward": "b g r s",
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors(name: str) -> None:
    assert {factor.name for factor in factors_of(built(name))} == set(FACTORS[name].split())


LINEAR = {
    "add": [{0, 1}],
    "add a number": [],
    "mul": [{0}, {1}],
    "div": [{0}],
    "integers": [{0}],
    "where": [{1, 2}],
    "masked fill with 0": [{0}],
    "masked fill": [],
    "to float": [{0}],
    "to integer": [],
    "logical": [],
    "pad with 0": [{0}],
    "pad": [],
    "addmm": [{0, 1}, {0, 2}],
    "embedding": [{0}],
    "layer norm backward": [{0}],
    "convolution": [{0, 2}, {1, 2}],
    "attention": [],
    "attention backward": [{0}],
    "attention backward, of both results": [{0, 1}],
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_sets(name: str) -> None:
    rule = rule_of(built(name))
    assert rule is not None and [set(group) for group in rule.linear] == LINEAR[name]


def test_zeros_beside_make_an_operand_linear_alone() -> None:
    """The joint graph masks gradients with `where(mask, gradient, scalar_tensor(0))`."""
    node = built("where")
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.scalar_tensor.default, (0.0,))
    zero.meta["val"], DIMS[zero] = torch.zeros(()), ((),)
    node.args = (*node.args[:2], zero)
    rule = rule_of(node)
    assert rule is not None and [set(group) for group in rule.linear] == [{1, 2}, {1}]
    assert prove(node) == []


def test_zeros_are_known_behind_a_reshard() -> None:
    """The search decides by what is zero; the check after it must find the same."""
    node = built("scatter add")
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.zeros.default, ([4, 6],))
        moved = node.graph.call_function(reshard, (zero, Sharding(((), ()))))
    for made in (zero, moved):
        made.meta["val"], DIMS[made] = torch.zeros(4, 6), DIMS[node.args[0]]  # type: ignore[index]
    node.args = (moved, *node.args[1:])
    assert is_zero(moved) and "i" in {factor.name for factor in factors_of(node)}


def test_accumulating_into_zeros_sums_over_the_indices() -> None:
    node = built("index put")
    with node.graph.inserting_before(node):
        zero = node.graph.call_function(aten.zeros.default, ([2, 4, 6],))
    zero.meta["val"], DIMS[zero] = torch.zeros(2, 4, 6), DIMS[node]
    assert not [factor for factor in factors_of(node) if factor.name.startswith("i")]
    node.args = (zero, *node.args[1:])
    assert [factor.name for factor in factors_of(node) if factor.name.startswith("i")] == ["i0", "i1"]
    assert prove(node) == []


def test_one_value_at_two_places_counts_by_its_places() -> None:
    """`h.scatter(1, ids, h)` is linear in what it writes and in what it writes into together: in neither alone."""
    values = torch.empty(4, 6)
    node = instance(aten.scatter.src, values, 1, torch.zeros(4, 6, dtype=torch.int64), values)
    node.args = (*node.args[:3], node.args[0])
    rule = rule_of(node)
    assert rule is not None and [set(group) for group in rule.linear] == [{0, 2}]
    assert prove(node) == []
    triangle = instance(aten.linalg_solve_triangular.default, torch.eye(4), torch.eye(4), upper=True)
    triangle.args = (triangle.args[0], triangle.args[0])
    rule = rule_of(triangle)
    assert rule is not None and [set(group) for group in rule.linear] == [{1}]


FLOPS = {
    "mm": 2 * 4 * 6 * 8,
    "bmm": 2 * 2 * 4 * 6 * 3,
    "addmm": 2 * 4 * 6 * 8,
    "convolution": 2 * 4 * 64 * 4 * 6 * 9,
    "convolution in groups": 2 * 2 * 16 * 8 * 4 * 9,
    "convolution by channel": 2 * 4 * 64 * 6 * 9,
    "convolution backward": 2 * 2 * 4 * 64 * 4 * 6 * 9,
    "attention": 4 * 2 * 4 * 6 * 10 * 8,
    "attention backward": 10 * 2 * 4 * 6 * 10 * 8,
    "add": 0,
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name: str) -> None:
    rule = rule_of(built(name))
    assert rule is not None and rule.flops == FLOPS[name]


def claim(operands: str, results: str, **fields: object) -> Rule:
    def labels(terms: str) -> tuple[tuple[str | None, ...], ...]:
        return tuple(tuple(None if label == "." else label for label in term) for term in terms.split(","))

    return Rule(labels(operands), labels(results), **fields)  # type: ignore[arg-type]


# (instance, a rule that claims too much, what the report says)
FAULTS = [
    ("add a number", claim("ab", "ab", linear=(frozenset({0}),)), "is off by"),
    ("exp", claim("ab", "ab", linear=(frozenset({0}),)), "is off by"),
    ("mul", claim("ab,ab", "ab", linear=(frozenset({0, 1}),)), "is off by"),
    ("masked fill", claim("ab,ab", "ab", linear=(frozenset({0}),)), "is off by"),
    ("pad", claim("a.", "a.", linear=(frozenset({0}),)), "is off by"),
    ("softmax", claim("abc", "abc"), "is off by"),
    ("cumsum", claim("ab", "ab"), "is off by"),
    ("amax", claim("abc", "ab"), "is off by"),
    ("mean", claim("abc", "ac"), "is off by"),
    ("addmm", claim("n,mk,kn", "mn"), "is off by"),
    ("mm", claim("mk,kn", "m."), "has local shapes"),
    ("convolution", claim("nc..,oc..,o", "no.."), "is off by"),
    ("convolution backward", claim("no..,nc..,oc..", "nc..,oc..,o"), "is off by"),
    ("layer norm", claim("abc,c,c", "abc,ab.,ab."), "the local op fails"),
    ("layer norm backward", claim("ab.,ab.,ab.,ab.,.,.", "ab.,.,.", linear=(frozenset({0, 1}),)), "is off by"),
    ("gather", claim("ab,a.", "a.", reductions={"b": "max"}), "is off by"),
    ("index select", claim("ab,i", "ai"), "the local op fails"),
    ("flip", claim("ab", "ab"), "is off by"),
    ("attention, causal", claim("bhs.,bh..,bh..", "bhs.,bhs"), "is off by"),
    ("attention", claim("bhs.,b.t.,b.t.,b.st,bhs.,,t", "bhs.,bhs"), "is off by"),
    ("embedding", claim("vh,ab", "abh", reductions={"v": "max"}), "is off by"),
    ("index", claim("v.h,ab", ".abh"), "has local shapes"),
]


@pytest.mark.parametrize(("name", "planted", "word"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_rule_that_claims_too_much_is_caught(name: str, planted: Rule, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = built(name)
    monkeypatch.setitem(RULES, node.target, lambda _: planted)
    failures = prove(node)
    assert failures and word in " ".join(failures)


@pytest.mark.parametrize("dtype, labels", [(torch.int32, ("d0", "d1")), (torch.float64, ("d0", None)), (torch.int8, ("d0", None))])
def test_bits_are_read_anew_of_neighbours_along_the_last_dim(dtype: torch.dtype, labels: tuple[str | None, ...]) -> None:
    read = instance(torch.ops.aten.view.dtype, torch.empty(4, 6), dtype)
    rule = rule_of(read)
    assert rule is not None and rule.operands == rule.results == (labels,) and not rule.linear
    held = torch.randn(8, 8)
    model = Layer(lambda self, x: self.linear(x).square().mean() + held.view(dtype)[:, :4].double().tanh().mean().float())
    x = torch.randn(8, 4)
    parallel = compiled(model, {"dp": 2, "tp": 2}, (x,))
    assert parallel.verify(x)
