"""The bias of a convolution becomes an addition of its own.

A product split over its input channels is an unreduced sum; a fused bias would have to be added once, not on every rank.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, replace
from autopar.ir.arguments import arguments
from autopar.ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class DecomposeConvolutions:
    """`convolution` and an `add` of the bias apart; the gradient of the bias is a sum of the output's gradient.

    Reads: val. Writes: val, PHASE, SOURCE of new nodes. Ensures: no convolution has a bias, no backward of one yields its gradient.
    """

    name: str = "decompose convolutions"

    def apply(self, program: Program) -> Program:
        if not any(node.target in (aten.convolution.default, aten.convolution_backward.default) for node in program.graph.nodes):
            return program
        program = program.copy()
        for node in list(program.graph.nodes):
            if node.target == aten.convolution.default and isinstance(node.args[2], Node):
                _bias_apart(Emitter(program.graph, before=node), node)
            elif node.target == aten.convolution_backward.default and node.args[3] is not None and node.args[-1][2]:
                _bias_gradient_apart(Emitter(program.graph, before=node), node)
        remove_dead_code(program.graph)
        return program


def _bias_apart(emit: Emitter, node: Node) -> None:
    x, weight, bias, *literals = arguments(node)
    assert isinstance(bias, Node)
    product = emit.call(node.target, x, weight, None, *literals)
    shape = product.meta["val"].shape
    row = emit.call(aten.view.default, bias, [shape[1] if dim == 1 else 1 for dim in range(len(shape))])
    replace(node, emit.call(aten.add.Tensor, product, row))


def _bias_gradient_apart(emit: Emitter, node: Node) -> None:
    gradient, x, weight, _, *literals, mask = arguments(node)
    assert isinstance(gradient, Node) and isinstance(mask, (list, tuple))
    wanted = [bool(mask[0]), bool(mask[1])]
    products = emit.call(node.target, gradient, x, weight, None, *literals, [*wanted, False]) if any(wanted) else None
    for user in list(node.users):
        assert user.target is operator.getitem
        if not user.users:
            node.graph.erase_node(user)
        elif user.args[1] == 2:
            dims = [dim for dim in range(gradient.meta["val"].ndim) if dim != 1]
            replace(user, emit.call(aten.sum.dim_IntList, gradient, dims))
        else:
            assert products is not None
            user.args = (products, user.args[1])
    node.graph.erase_node(node)
