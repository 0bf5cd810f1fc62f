"""The batch is followed from the inputs through everything that walks with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from autopar.driver.manager import run_passes
from autopar.ir.keys import BATCH, DIMS
from autopar.ir.program import Program
from autopar.ir.sharding import flat
from tests.support.graphs import find, traced, with_atoms
from tests.support.models.zoo import BATCH as NUM_SAMPLES
from tests.support.models.zoo import ZOO
from tests.support.programs import FORWARD_PASSES, forward_program, global_program

aten = torch.ops.aten


def program_of(function: Callable[..., Any], *tensors: Tensor, parameters: tuple[int, ...] = ()) -> Program:
    return with_atoms(traced(function, *tensors, parameters=parameters))


def batch_of(node: Node) -> list[tuple[int, ...]]:
    """Sizes of the batch atoms of every result."""
    return [tuple(flat(dims)[i] for i in places) for dims, places in zip(DIMS[node], BATCH[node], strict=True)]


def test_the_batch_walks_through_products_and_views() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = aten.mm.default(aten.view.default(x, [32, 6]), w)
        return aten.sum.dim_IntList(aten.view.default(product, [8, 4, 2, 3]), [0])

    program = program_of(function, torch.randn(8, 4, 6), torch.randn(6, 6), parameters=(1,))
    (product,), (total,) = find(program, aten.mm.default), find(program, aten.sum.dim_IntList)
    assert DIMS[product] == (((8, 4), (2, 3)),) and BATCH[product] == ((0,),)
    assert BATCH[program.placeholders[0]] == ((0,),) and BATCH[program.placeholders[1]] == ((),)
    assert batch_of(total) == [()]


def test_an_input_without_a_batch_has_none_until_it_meets_one() -> None:
    program = program_of(lambda x, table: aten.add.Tensor(x, table), torch.randn(8, 6), torch.randn(6), parameters=(1,))
    assert BATCH[program.placeholders[1]] == ((),)
    program = program_of(lambda x, table: aten.add.Tensor(x, table), torch.randn(8, 6), torch.randn(8, 6), parameters=(1,))
    assert batch_of(program.placeholders[1]) == [(8,)], "what is added to the batch sample by sample is of the batch"


def test_every_result_of_an_op_is_marked() -> None:
    program = program_of(lambda x: aten.max.dim(x, 1), torch.randn(8, 6))
    (both,) = find(program, aten.max.dim)
    assert batch_of(both) == [(8,), (8,)]
    assert [batch_of(user) for user in both.users] == [[(8,)], [(8,)]]


def test_two_inputs_of_one_batch() -> None:
    program = program_of(lambda x, y: aten.bmm.default(x, y), torch.randn(8, 3, 4), torch.randn(8, 4, 5))
    (product,) = find(program, aten.bmm.default)
    assert batch_of(product) == [(8,)]


@pytest.mark.parametrize("name", ZOO)
def test_the_batch_of_the_zoo(name: str) -> None:
    """Every batch atom has the batch's size, no parameter or gradient has one, every hidden state has."""
    case = ZOO[name]()
    program = forward_program(case.model, case.batch, traced(lambda x: aten.neg.default(x), torch.randn(2)).mesh)
    program = global_program(run_passes(program, FORWARD_PASSES))
    for node in program.graph.nodes:
        for sizes in batch_of(node) if node.op != "output" else ():
            assert sizes in ((), (NUM_SAMPLES,)), (node, sizes)
    for item, node in program.named_inputs():
        assert batch_of(node) == [(NUM_SAMPLES,) if item.kind == "batch" else ()], item
    for item, node in program.named_outputs():
        assert batch_of(node) == [()], item
    products = [node for node in find(program, aten.mm.default) if case.batch.get("labels") is not None]
    with_batch = [node for node in products if batch_of(node) == [(NUM_SAMPLES,)]]
    weight_gradients = [node for node in products if batch_of(node) == [()]]
    assert with_batch and weight_gradients and len(with_batch) + len(weight_gradients) == len(products)


def test_a_constant_that_stands_for_the_batch_and_for_another_dim_joins_neither() -> None:
    """As many samples as positions: one `arange` counts both."""

    def function(x: Tensor) -> Tensor:
        count = aten.arange.default(8, device=torch.device("cpu"))
        samples = aten.mul.Tensor(x, aten.view.default(aten.mul.Tensor(count, 3), [8, 1]))
        return aten.mul.Tensor(samples, aten.mul.Tensor(count, 5))

    program = program_of(function, torch.randn(8, 8))
    (total,) = program.results
    assert batch_of(program.placeholders[0]) == batch_of(total) == [(8,)]
    (count,) = find(program, aten.arange.default)
    of_samples, of_positions = count.users
    assert batch_of(of_samples) == [(8,)] and batch_of(of_positions) == batch_of(count) == [()]
