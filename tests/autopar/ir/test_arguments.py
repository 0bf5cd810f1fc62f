"""Arguments in their types, and what is no such argument is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from autopar.ir.arguments import call_of, float_at, float_named, int_at, ints_at, list_at, node_at

aten = torch.ops.aten


def call() -> Node:
    graph = Graph()
    x = graph.placeholder("x")
    return graph.call_function(aten.permute.default, (x, [1, 0], 2, 0.5, "sum", True))


def test_arguments_are_what_they_are() -> None:
    node = call()
    assert node_at(node, 0).name == "x" and ints_at(node, 1) == [1, 0] and list_at(node, 1) == [1, 0]
    assert int_at(node, 2) == 2 and int_at(node, 5) == 1 and float_at(node, 2) == 2.0 and float_at(node, 3) == 0.5
    assert call_of(node) is aten.permute.default


@pytest.mark.parametrize("read, position", [(node_at, 1), (int_at, 3), (int_at, 0), (float_at, 4), (list_at, 4), (list_at, 0)])
def test_another_type_is_an_error_that_shows_the_call(read: Callable[[Node, int], object], position: int) -> None:
    with pytest.raises(AssertionError, match=rf"argument {position} of .*permute"):
        read(call(), position)


def test_numbers_by_name_have_a_default() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    scaled = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2, "beta": None, "gamma": "sum"})
    assert [float_named(scaled, name, 1.0) for name in ("alpha", "beta", "delta")] == [2.0, 1.0, 1.0]
    with pytest.raises(AssertionError, match="gamma of .* is 'sum'"):
        float_named(scaled, "gamma", 1.0)


def test_a_list_of_other_things_is_no_list_of_numbers() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    with pytest.raises(AssertionError, match="argument 0 of .*cat"):
        ints_at(graph.call_function(aten.cat.default, ([x, x],)), 0)


def test_an_input_calls_nothing() -> None:
    with pytest.raises(AssertionError, match="calls nothing"):
        call_of(Graph().placeholder("x"))
