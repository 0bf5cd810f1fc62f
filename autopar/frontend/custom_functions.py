"""A `torch.autograd.Function` of the user's: captured with its backward.

`torch.export` runs such a function without gradients and keeps what its forward computes: the backward written beside it would be
lost, and gradients silently wrong. So while a model is exported each call stands in the graph as one opaque op, and FORWARD
programs call in its place a function that brings both halves: autograd's trace then finds the backward that the user wrote.

    with custom_functions_kept():
        exported = torch.export.export(…)           # autopar.custom_function(operands, site)
    function_at(site)(*operands)                    # what the FORWARD program calls
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import MARKS_DIRTY, TorchDispatchMode, outside_fake_modes, pytree
from autopar.errors import CaptureError
from autopar.frontend._torch import custom_functions_replaced
from autopar.graph.custom_functions import CustomFunction, Results, as_function, custom_function
from autopar.ir.arguments import arguments, node_at

_functions: dict[int, Callable[..., Results]] = {}
_sites = itertools.count()


def _results(operands: Sequence[Tensor], site: int) -> list[Tensor]:
    function = custom_function(_functions[site])
    assert function is not None
    return list(function.results(*operands))


torch.library.define("autopar::custom_function", "(Tensor[] operands, int site) -> Tensor[]")
torch.library.impl("autopar::custom_function", "CompositeExplicitAutograd", _results)
torch.library.register_fake("autopar::custom_function", _results)


@contextmanager
def custom_functions_kept() -> Generator[None]:
    """While this is entered, export keeps every custom function as one call of `autopar.custom_function`."""
    before = set(_functions)
    try:
        with custom_functions_replaced(_keep):
            yield
    finally:
        for site in set(_functions) - before:
            del _functions[site]


def _keep(forward: GraphModule, backward: GraphModule, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:
    results = arguments(forward.graph.output_node())[0][0]
    leaves = list(results) if isinstance(results, (tuple, list)) else [results]
    is_written = options.get("dirty_idx") if MARKS_DIRTY else _may_be_dirty(forward)
    if is_written or not all(isinstance(each, Tensor) for each in operands) or not all(isinstance(x, Node) for x in leaves):
        written = (
            "writes into its input (mark_dirty)" if MARKS_DIRTY else "writes in place (before torch 2.13 its gradients would be wrong)"
        )
        raise CaptureError(
            f"a torch.autograd.Function {written}, or takes or returns something that is no tensor\n"
            "  how to mend it: let it take and return tensors, and write out of place"
        )
    for half in (forward, backward):
        _make_constants(half)
    is_tuple = isinstance(results, (tuple, list))
    found = keep(CustomFunction(forward, backward, dict(options), is_tuple), operands)
    return found if is_tuple else found[0]


def _may_be_dirty(forward: GraphModule) -> bool:
    """Whether an operand may be written into, which is what `mark_dirty` is for. Torch that does not tell has wrong gradients of other
    writes, too, but by an index into what forward made."""
    given = {_memory(node) for node in forward.graph.find_nodes(op="placeholder")}
    return any(
        _memory(node_at(node, 0)) in given if node.target is operator.setitem else _writes(node)
        for node in forward.graph.nodes
        if node.op in ("call_function", "call_method")
    )


_IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
)  # fmt: skip


def _memory(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("example_value")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else None


def _writes(node: Node) -> bool:
    """In place, `x.mul_(2)` or `x *= 2`, into `out=`, or with `inplace=`."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return is_in_place or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))


def _make_constants(half: GraphModule) -> None:
    """Make by ops what `half` makes of numbers, `torch.tensor(0.3)`, `x[0] = 0.3` or `x[[1, 0]]`: a joint trace would leave it with a
    tensor that no program has."""
    for node in list(half.graph.nodes):
        if node.target in (operator.getitem, operator.setitem):
            node.args = (node.args[0], _made_index(half, node), *node.args[2:])
        if node.target in (torch.tensor, torch.as_tensor, torch.asarray) and not node.all_input_nodes:
            data = node.args[0] if node.args else next(iter(node.kwargs.values()))  # the first, whatever it is called
            node.replace_all_uses_with(_made(half, node, data, node.kwargs.get("dtype"), node.kwargs.get("device")))
            half.graph.erase_node(node)
        elif node.target is operator.setitem and isinstance(node.args[2], (bool, int, float, complex)) and _makes_tensor(node.args[1]):
            written = node.args[0].meta["example_value"]
            node.args = (*node.args[:2], _made(half, node, node.args[2], written.dtype, written.device))
    half.recompile()


def _made_index(half: GraphModule, node: Any) -> Any:
    """The index of a read or write; torch makes a tensor of each list of numbers in it."""

    def made(part: Any) -> Any:
        leaves = pytree.tree_leaves(part)
        if not isinstance(part, list) or not all(isinstance(each, int) for each in leaves):
            return part
        return _made(half, node, part, None if leaves else torch.int64, node.args[0].meta["example_value"].device)

    index: Any = node.args[1]
    if isinstance(index, tuple):
        return tuple(map(made, index))
    # Torch takes a list of lists for a tuple of them, or for one tensor, by its version.
    return index if isinstance(index, list) and any(isinstance(each, list) for each in index) else made(index)


class _Targets(TorchDispatchMode):
    """The ops that are called while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _gives_numbers_to_ops() -> bool:
    """Whether torch gives a number that is written by an index to an op as it is; it does since 2.15, and made a tensor of it before."""
    with _Targets() as targets:
        torch.zeros(1, device="cpu")[0] = 0.5
    return torch.ops.aten.lift_fresh.default not in targets.seen


_GIVES_NUMBERS_TO_OPS = _gives_numbers_to_ops()


def _makes_tensor(index: Any) -> bool:
    """Whether torch makes a tensor of a number that is written by this index: of several tensors, at least, it does."""
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return not _GIVES_NUMBERS_TO_OPS or sum(isinstance(part, Node) for part in parts) > 1


def _made(half: GraphModule, before: Node, data: Any, dtype: torch.dtype | None, device: Any) -> Node:
    """`torch.tensor(data)`, in front of a node."""
    with outside_fake_modes():
        made = torch.tensor(data, dtype=dtype)
    with half.graph.inserting_before(before):
        return _filled(half, made.tolist(), made.dtype, device)


def _filled(half: GraphModule, numbers: Any, dtype: torch.dtype, device: Any) -> Node:
    if isinstance(numbers, list) and numbers:
        return half.graph.call_function(torch.stack, ([_filled(half, each, dtype, device) for each in numbers],))
    shape, value = ([0], 0) if isinstance(numbers, list) else ([], numbers)
    return half.graph.call_function(torch.full, (shape, value), {"dtype": dtype, "device": device})


def keep(function: CustomFunction, operands: Sequence[Tensor]) -> Results:
    """A call of `function` as an opaque op, for the export under way."""
    site = next(_sites)
    _functions[site] = as_function(function)
    return tuple(torch.ops.autopar.custom_function.default(list(operands), site))


def function_at(site: int) -> Callable[..., Results]:
    return _functions[site]
