"""Gives every node of a graph its fake value, in order, and writes out the casts of calls that run under autocast."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import DATA_DEPENDENT_ERRORS, FakeTensorMode, fake_errors_quiet, fake_mode, pytree
from autopar.errors import CaptureError
from autopar.graph.autocast import CastInsideError, Casts, CastsOfCalls, Region, Tensor
from autopar.graph.emit import copy_origin, replace, tensor_of
from autopar.graph.lying import Lying
from autopar.ir.arguments import call_of, node_at
from autopar.ir.program import Program
from autopar.ir.source import source_of

aten = torch.ops.aten

# What gives its operand another shape in place, or takes it off the tape: in a graph a node has one shape, for all who read it.
IN_PLACE_VIEWS: dict[Any, Any] = {
    aten.detach_.default: aten.detach.default,
    aten.swapaxes_.default: aten.transpose.int,
    aten.swapdims_.default: aten.transpose.int,
    aten.as_strided_.default: aten.as_strided.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
}


def set_fake_values(program: Program, regions: Mapping[Node, Region], leaves: Collection[Node] | None = None) -> None:
    """Set `val` of every node of a FORWARD program, on the CPU, all of one mode; calls in `regions` get their casts as nodes.

    `leaves` are the parameters that are cast once; those that get gradients by default. Raises `CaptureError` where a call does not take
    its operands.
    """
    if leaves is None:
        leaves = [node for item, node in program.named_inputs() if item.kind == "parameter" and item.requires_grad]
    for region in {id(region): region for region in regions.values()}.values():
        region.leaves = frozenset(leaves)
    if any(region.autocast is not None for region in regions.values()):
        _drop_moves(program)
    values = _Values(program, mode := fake_mode(), regions)
    with mode:
        for item, node in program.named_inputs():
            node.meta["val"] = torch.empty(item.shape, dtype=item.dtype, device="cpu")
    with fake_errors_quiet():
        values.set()


def _drop_moves(program: Program) -> None:
    """`x.to(device)` was traced with the dtype that x had, which it is not to have now. What names a dtype is another op (`to.device`)."""
    for node in list(program.graph.nodes):
        if node.target is aten.to.dtype_layout and not node.kwargs.get("copy") and tensor_of(node).dtype == tensor_of(node.args[0]).dtype:
            replace(node, node_at(node, 0))


class _Values:
    def __init__(self, program: Program, mode: FakeTensorMode, regions: Mapping[Node, Region]) -> None:
        self._graph, self._mode, self._regions = program.graph, mode, regions
        self._casts = CastsOfCalls(mode)
        self._lying = Lying(program.graph, self._call)

    def set(self) -> None:
        for node in self._graph.nodes:
            if node.op != "call_function":
                continue
            region = self._regions.get(node)
            try:
                if region is None or node.target is operator.getitem or not self._cast(node, region):
                    self._run(node)
            except CastInsideError as error:
                raise CaptureError(
                    f"under torch.autocast {error}, which no program for all devices has\n  where: {source_of(node).at}\n"
                    "  how to mend it: compute it under torch.autocast(..., enabled=False), its operands cast to float32"
                ) from None
            except DATA_DEPENDENT_ERRORS as error:
                raise CaptureError(
                    f"{node.target} goes by the values of a tensor inside, which are not known yet ({error})\n"
                    f"  where: {source_of(node).at}\n"
                    "  how to mend it: write it in plain ops: pairs, as torch.combinations makes them, by x[rows], x[columns] of "
                    "rows, columns = torch.triu_indices(n, n, 1)"
                ) from error
            except (RuntimeError, TypeError) as error:
                raise CaptureError(
                    f"{node.target} does not take what it gets: {str(error).splitlines()[0]}\n  where: {source_of(node).at}\n"
                    "  how to mend it: call the model alone; it fails there, too, or cast the operands of this line to one dtype"
                ) from error

    def _run(self, node: Node) -> None:
        self._lying.before(node)
        try:
            self._compute(node)
        except (RuntimeError, ValueError):
            if not self._lying.copy(node):
                raise
            self._compute(node)
        if self._lying.after(node):
            self._compute(node)

    def _compute(self, node: Node) -> None:
        args, kwargs = self._values(node)
        with self._mode, torch.no_grad():
            node.meta["val"] = call_of(node)(*args, **kwargs)

    def _values(self, node: Node) -> tuple[Any, Any]:
        return torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])

    def _cast(self, node: Node, region: Region) -> bool:
        """Write out the casts of `node`. True if it was replaced, and has no value to compute."""
        casts = region.casts_of(node, *self._values(node), self._casts)
        if casts.events:
            self._take_apart(node, casts)
            return True
        if casts.dtype is not None:
            node.kwargs = dict(node.kwargs) | {"dtype": casts.dtype}
        leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
        for place, dtype in casts.operands.items():
            leaves[place] = self._cast_once(leaves[place], dtype, node, region)
        node.args, node.kwargs = pytree.tree_unflatten(leaves, structure)
        return False

    def _cast_once(self, operand: Node, dtype: torch.dtype, reader: Node, region: Region) -> Node:
        """`operand` in `dtype`. A parameter of float32 is cast to the lower dtype once, as torch keeps the copy."""
        autocast = region.autocast
        assert autocast is not None
        is_kept = autocast.caches and dtype == autocast.dtype and operand in region.leaves and tensor_of(operand).dtype == torch.float32
        if not is_kept:
            return self._call(reader, aten._to_copy.default, (operand,), {"dtype": dtype})
        if (operand, dtype) not in region.weights:
            region.weights[operand, dtype] = self._call(reader, aten._to_copy.default, (operand,), {"dtype": dtype})
        return region.weights[operand, dtype]

    def _call(self, before: Node, target: Any, args: Any, kwargs: Any) -> Node:
        with self._graph.inserting_before(before):
            node = self._graph.call_function(target, args, kwargs)
        copy_origin(before, node)
        self._run(node)
        return node

    def _take_apart(self, node: Node, casts: Casts) -> None:
        """The ops that `node` consists of under autocast, in its place."""
        tensors: dict[int, Node] = {
            place: leaf for place, leaf in enumerate(pytree.tree_leaves((node.args, dict(node.kwargs)))) if isinstance(leaf, Node)
        }
        for event in casts.events:
            leaves = [tensors[leaf.number] if isinstance(leaf, Tensor) else leaf for leaf in event.arguments]
            leaves = [torch.device("cpu") if isinstance(leaf, torch.device) else leaf for leaf in leaves]
            made = self._call(node, IN_PLACE_VIEWS.get(event.target, event.target), *pytree.tree_unflatten(leaves, event.structure))
            for place, number in enumerate(event.results):
                tensors[number] = self._call(node, operator.getitem, (made, place), {}) if event.is_tuple else made
        if isinstance(casts.returned, Tensor):
            node.replace_all_uses_with(tensors[casts.returned.number])
        else:
            for user in list(node.users):
                user.replace_all_uses_with(tensors[casts.returned[user.args[1]].number])
                self._graph.erase_node(user)
        self._graph.erase_node(node)
