"""Pieces are known through views, permutations and products, and put together again they are what was cut."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from autopar._torch import fake_mode
from autopar.graph.emit import Emitter
from autopar.graph.pieces import Digit, after, before, cut, joined, piece_of, shape_at

aten = torch.ops.aten
SHAPE = (2, 4, 6, 5)


def given(graph: Graph, name: str, shape: tuple[int, ...]) -> Node:
    node = graph.placeholder(name)
    with fake_mode_of_tests:
        node.meta["val"] = torch.empty(shape)
    return node


fake_mode_of_tests = fake_mode()


@pytest.mark.parametrize("seed", range(8))
def test_what_calls_make_of_pieces_are_pieces_of_what_they_make(seed: int) -> None:
    """Permuted, merged and multiplied; some pieces are no whole rows, and then nothing is said."""
    draw = random.Random(seed)
    graph = Graph()
    x, weight = given(graph, "x", SHAPE), given(graph, "weight", (SHAPE[-1], 3))
    end = graph.output(x)
    emit = Emitter(graph, end, x)
    order = [*draw.sample(range(3), 3), 3]
    calls = [emit.call(aten.permute.default, x, order)]
    calls.append(emit.call(aten.reshape.default, calls[-1], [48, SHAPE[-1]]))
    calls.append(emit.call(aten.mm.default, calls[-1], weight))
    dim = draw.randrange(3)
    number = draw.choice([n for n in (2, 3, 4) if SHAPE[dim] % n == 0])
    digit = Digit(number=number, stride=SHAPE[dim] // number * int(torch.Size(SHAPE[dim + 1 :]).numel()))
    pieces = cut(emit, x, digit)
    for node in calls:
        made = after(node, digit)
        assert made is not None and before(node, made) == digit
        pieces, digit = [piece_of(emit, node, [each], made) for each in pieces], made
    end.args = ((calls[-1], joined(emit, pieces, digit, shape_at(calls[-1]))),)
    whole, together = GraphModule(torch.nn.Module(), graph)(torch.randn(SHAPE), torch.randn(SHAPE[-1], 3))
    torch.testing.assert_close(together, whole, rtol=1e-5, atol=1e-6)


def test_the_inner_dim_of_a_product_is_in_no_piece() -> None:
    graph = Graph()
    x, weight = given(graph, "x", (6, 4)), given(graph, "weight", (4, 3))
    product = Emitter(graph, graph.output(x), x).call(aten.mm.default, x, weight)
    assert after(product, Digit(2, 2)) is None and after(product, Digit(12, 2)) == Digit(9, 2)
    assert before(product, Digit(1, 3)) is None


def test_a_piece_lies_within_one_dim() -> None:
    assert Digit(10, 2).place((4, 5)) == (0, 1, 2)
    assert Digit(5, 2).place((4, 5)) == (0, 2, 1)
    assert Digit(2, 2).place((4, 5)) is None
