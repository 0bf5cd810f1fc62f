"""Reshards stand where a value is not what its reader needs, once per value and target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.checks.checker import check
from autopar.driver.manager import run_passes
from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Output, Program, operands
from autopar.ir.sharding import Sharding, Strategy
from autopar.ops.strategies import strategies_of
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.testing.random_shardings import RandomShardings
from tests.support.graphs import find, traced, with_atoms

aten = torch.ops.aten
MESH = Mesh((("tp", 2),))
X, W = torch.randn(8, 12), torch.randn(12, 16)


def decided(program: Program, **choices: str) -> Program:
    """`choices` by node name, as `str(strategy)` prints them: `mm="dp:m tp:n"`; inputs and all others are replicated."""
    program = program.copy()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            whole = Sharding.replicated(DIMS[node][0])
            STRATEGY[node], SHARDING[node] = Strategy((), (whole,)), (whole,)
        elif node.op == "call_function":
            found = {str(strategy): strategy for strategy in strategies_of(node, program.mesh)}
            strategy = found[choices.get(node.name, "replicated")]
            STRATEGY[node], SHARDING[node] = strategy, strategy.results
    return program


def relu_of_product(x: Tensor, w: Tensor) -> Tensor:
    return aten.relu.default(aten.mm.default(x, w))


def layer(function: Callable[..., Any] = relu_of_product, mesh: Mesh = MESH) -> Program:
    return with_atoms(traced(function, X, W, mesh=mesh, parameters=(1,)))


def reshards(program: Program) -> list[str]:
    """`x: from → to, read by …`."""
    lines = []
    for node in find(program, reshard):
        (source,) = operands(node)
        before, after = (SHARDING[each][0].describe(DIMS[each][0]) for each in (source, node))
        lines.append(f"{source.name}: {before} → {after}, read by {', '.join(sorted(user.name for user in node.users))}")
    return lines


def test_a_split_product_is_reduced_before_a_nonlinear_op() -> None:
    program = InsertReshards().apply(decided(layer(), mm="tp:k"))
    assert reshards(program) == [
        "x_1: [8, 12] → [8, 12@tp], read by mm",
        "w_1: [12, 16] → [12@tp, 16], read by mm",
        "mm: [8, 16] sum@tp → [8, 16], read by relu",
    ]
    check(program)


def test_what_fits_needs_no_reshard() -> None:
    assert reshards(InsertReshards().apply(decided(layer()))) == []


def test_one_reshard_serves_all_readers_of_one_target() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        product = aten.mm.default(x, w)
        return [aten.relu.default(product), aten.neg.default(aten.relu.default(product)), aten.exp.default(product)]

    program = InsertReshards().apply(decided(layer(function), mm="tp:k"))
    assert [line for line in reshards(program) if line.startswith("mm")] == ["mm: [8, 16] sum@tp → [8, 16], read by exp, relu, relu_1"]
    check(program)


def test_a_value_read_twice_by_one_call_may_be_needed_in_two_ways() -> None:
    program = InsertReshards().apply(decided(layer(lambda x, w: aten.mm.default(aten.t.default(x), x)), mm="tp:n"))
    assert [line for line in reshards(program) if line.startswith("x_1")] == ["x_1: [8, 12] → [8, 12@tp], read by mm"]
    check(program)


def test_a_shard_of_a_value_that_is_reduced_anyway_is_a_slice_of_the_reduced_one() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        product = aten.mm.default(x, w)
        return [aten.relu.default(product), aten.exp.default(product)]

    found = strategies_of(find(layer(function), aten.exp.default)[0], MESH)
    split = next(str(strategy) for strategy in found if strategy.results[0] == Sharding(((), ("tp",))))
    program = InsertReshards().apply(decided(layer(function), mm="tp:k", exp=split))
    assert reshards(program)[2:] == [
        "mm: [8, 16] sum@tp → [8, 16], read by relu, reshard_3",
        "reshard_2: [8, 16] → [8, 16@tp], read by exp",
        "exp: [8, 16@tp] → [8, 16], read by output",
    ]
    check(program)


def test_an_operand_of_several_results_is_read_by_name() -> None:
    program = InsertReshards().apply(decided(layer(lambda x, w: aten.relu.default(aten.max.dim(x, 1)[0]))))
    check(program)


@pytest.mark.parametrize("seed", range(5))
def test_a_reshard_of_an_input_stands_where_the_input_is_read(seed: int) -> None:
    """One of a reshard, too: three calls read one parameter, which has no line of its own."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        first = aten.mm.default(x, w)
        return aten.mm.default(aten.mm.default(first, aten.t.default(w)), w)

    start = run_passes(layer(function, Mesh((("dp", 2), ("tp", 2)))), (RandomShardings(seed),))
    for node in start.graph.nodes:
        if node.op == "call_function":
            SOURCE[node] = Source(module=node.name)
    program = InsertReshards().apply(start)
    for node in find(program, reshard):
        root = node
        while root.target is reshard:
            (root,) = operands(root)
        read_by = {SOURCE[user].module for user in node.users if user.op != "output"}
        assert root.op != "placeholder" or not read_by or SOURCE[node].module in read_by, node


def test_outputs_lie_as_the_contract_says() -> None:
    """A gradient as its parameter, an output without a tangent and a loss replicated; what is unreduced is reduced last."""
    program = decided(layer(lambda x, w: [aten.mm.default(x, w), aten.mul.Tensor(w, 2.0), aten.neg.default(x)]), mm="tp:k")
    outputs = (
        Output("loss", "0", (8, 16), torch.float32),
        Output("gradient", "1", (12, 16), torch.float32),
        Output("output", "2", (8, 12), torch.float32),
    )
    weight = next(node for node in program.placeholders if node.name == "w_1")
    rows = Sharding((("tp",), ()))
    STRATEGY[weight], SHARDING[weight] = Strategy((), (rows,)), (rows,)
    program = InsertReshards().apply(replace(program, signature=replace(program.signature, outputs=outputs)))
    assert [item.sharding for item in program.signature.outputs] == [Sharding(((), ())), Sharding((("tp",), ())), Sharding(((), ()))]
    for item, node in program.named_outputs():
        assert SHARDING[node][0] == item.sharding
    for item, node in program.named_inputs():
        assert item.sharding == SHARDING[node][0] and item.dims == DIMS[node][0]
    check(program)


@pytest.mark.parametrize("seed", range(10))
def test_every_reader_gets_what_its_strategy_names(seed: int) -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        hidden = aten.add.Tensor(aten.mm.default(x, w), 1.0)
        return [aten.mm.default(aten.t.default(hidden), hidden), aten.amax.default(hidden, [1]), aten.sum.default(hidden)]

    mesh = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2)))
    start = run_passes(layer(function, mesh), (RandomShardings(seed),))
    program = InsertReshards().apply(start)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not reshard:
            assert tuple(SHARDING[operand][0] for operand in operands(node)) == STRATEGY[node].operands
    for node in find(program, reshard):
        assert PHASE[node] == "forward" and node in SOURCE and node.users
        assert SHARDING[operands(node)[0]] != SHARDING[node]
    pairs = [(operands(node)[0], SHARDING[node]) for node in find(program, reshard)]
    assert len(set(pairs)) == len(pairs)
    assert not find(start, reshard), "a pass changes no program that it was given"
    check(program)
