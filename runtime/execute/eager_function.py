"""A fragment as one plain function, for the backend "eager": what plain PyTorch would call, and little else.

The program has each op in the form that shards well; run op by op, that form costs calls:

    t(t(w))                          → w
    reshape(reshape(x, a), b)        → reshape(x, b)         reshape(x, x.shape)  → x
    add(mm(x, w), bias)              → addmm(bias, x, w)     one kernel, which reads and writes the product once
    addmm(bias, x, t(w))             → linear(x, w, bias)    the same kernel, and one call less; mm(x, t(w)) likewise
    torch.ops.aten.mm.default(x, w)  → torch.mm(x, w)        the same kernel, called in half the time
    torch.ops.autopar.norm.default   → what it runs

Values and strides are those of the graph, but for the rounding of `addmm`, which is what `nn.Linear` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from autopar._torch import writes_operands
from autopar.ir.arguments import arguments
from autopar.kernels.registration import IMPLEMENTATIONS
from autopar.ops.traits import PERMUTES, permutation
from autopar.runtime._torch import below_autograd
from autopar.runtime.execute.failing_lines import note_of_line

aten = torch.ops.aten
Function = Callable[..., tuple[torch.Tensor, ...]]

# torch's own function for an op: the same arguments in the same order.
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.amax.default: torch.amax,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.sqrt.default: torch.sqrt,
    aten.stack.default: torch.stack,
    aten.sub.Tensor: torch.sub,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.squeeze.dim: torch.squeeze,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.where.self: torch.where,
}
_RESHAPES = (aten.reshape.default, aten.view.default)
_SAME_SHAPE = (*_RESHAPES, aten.expand.default)


class EagerFunction:
    """What `module`, the graph of a fragment, computes of its inputs; gradients are off.

    `placeable` are the numbers of results that it writes where it is told to.
    """

    def __init__(self, module: GraphModule) -> None:
        simple = simplified(module)
        self._places = _with_places(simple)
        self.placeable = tuple(self._places)
        self._module, self._forward = simple, cast(Function, simple.forward)

    def run(self, inputs: Sequence[torch.Tensor], into: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """`into` has contiguous memory of the right shape for some of the `placeable` results. What an op raises says where."""
        try:
            with below_autograd():
                return self._forward(*inputs, **{self._places[number]: memory for number, memory in into.items()})
        except Exception as error:
            note = note_of_line(self._module, self._forward.__code__, error)
            if note:
                error.add_note(note)
            raise


def _with_places(module: GraphModule) -> dict[int, str]:
    """Let products, and sums over some dims, that are results and nothing else be written into memory that is given: by number of the
    result the argument for it."""
    graph, found = module.graph, dict[int, str]()
    last = [*graph.find_nodes(op="placeholder")][-1:]
    output: Any = graph.output_node().args[0]
    results: tuple[Any, ...] = output if isinstance(output, tuple) else ()
    for number, node in enumerate(results):
        takes_out = isinstance(node, Node) and (node.target is torch.mm or (node.target is torch.sum and len(node.args) > 1))
        if last and takes_out and len(node.users) == 1 and sum(each is node for each in results) == 1:
            with graph.inserting_after(last[-1]):
                last = [graph.placeholder(f"into_{number}", default_value=None)]
            node.kwargs = {**node.kwargs, "out": last[0]}
            found[number] = str(last[0].target)
    module.recompile()
    return found


def simplified(module: GraphModule) -> GraphModule:
    """Another graph that computes the same. What writes into an operand is left as it is: views and copies are not the same there."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not any(writes_operands(node.target) for node in nodes):
        for node in nodes:
            _fold_view(node)
            _join_bias(node)
        for node in nodes:
            _join_transpose(node)  # after all biases, which look for products
        for node in reversed(nodes):
            if not node.users:
                graph.erase_node(node)
    for node in graph.nodes:
        node.target = DIRECT.get(node.target) or IMPLEMENTATIONS.get(node.target) or node.target
    return GraphModule(module, graph)


def _fold_view(node: Node) -> None:
    """Let a view look at what is below the views under it."""
    if not node.args or not isinstance(node.args[0], Node):
        return
    source = node.args[0]
    if node.target in _SAME_SHAPE and _shape(node) is not None and _shape(node) == _shape(source):
        node.replace_all_uses_with(source)
    elif node.target in _RESHAPES and source.target in _RESHAPES and len(source.users) == 1:
        # The one below may copy, of which the other is then a view: with other readers that would be two copies.
        if _lies_alike(node, source.args[0]):
            node.target, node.args = aten.reshape.default, (source.args[0], node.args[1])
    elif node.target in PERMUTES and source.target in PERMUTES:
        inner, outer = permutation(source), permutation(node)
        if [inner[dim] for dim in outer] == list(range(len(inner))):
            node.replace_all_uses_with(arguments(source)[0])


def _lies_alike(node: Node, source: Any) -> bool:
    """Whether `source` in the shape of `node` lies as `node` does: there are kernels that ask for strides."""
    value, below = node.meta.get("val"), source.meta.get("val") if isinstance(source, Node) else None
    if value is None or below is None:
        return False
    return torch.empty_strided(below.shape, below.stride(), device="meta").reshape(value.shape).stride() == value.stride()


def _join_bias(node: Node) -> None:
    """A product that one bias, a number for each column, is added to."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return
    first, second = arguments(node)
    for product, bias in ((first, second), (second, first)):
        if isinstance(product, Node) and isinstance(bias, Node) and product.target is aten.mm.default and len(product.users) == 1:
            whole, added = product.meta.get("val"), bias.meta.get("val")
            if whole is not None and added is not None and (tuple(added.shape), added.dtype) == ((whole.shape[1],), whole.dtype):
                node.target, node.args = aten.addmm.default, (bias, *product.args)
                return


def _join_transpose(node: Node) -> None:
    """A product with a transposed matrix, as `nn.Linear` has it."""
    bias, product = (node.args[:1], node.args[1:]) if node.target is aten.addmm.default else ((), node.args)
    if node.target not in (aten.addmm.default, aten.mm.default) or node.kwargs or (bias and len(_shape(bias[0]) or ()) != 1):
        return
    first, second = product
    if isinstance(second, Node) and second.target is aten.t.default and len(_shape(second) or ()) == 2:
        node.target, node.args = torch.nn.functional.linear, (first, second.args[0], *bias)


def _shape(node: Any) -> tuple[int, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
