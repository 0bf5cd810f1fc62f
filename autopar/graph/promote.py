"""Promotion to float64, of a program and of the original model alike, to tell mistakes from rounding.

Models cast to float32 inside whatever their weights are (logits, norms, rotary angles), so two programs that compute
the same agree to 1e-7 only. Promoted, the very same graph differs by rounding of float64: any larger difference is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autopar._torch import FakeTensorMode, TorchDispatchMode, fake_mode, pytree, schema_of
from autopar.graph.custom_functions import as_function, custom_function, mapped
from autopar.graph.default_eps import default_eps
from autopar.graph.fake_calls import empty_as
from autopar.ir.program import Input, Output, Program
from autopar.ir.schedule import Fragment, Schedule, TensorType
from autopar.ops.traits import casts_at_need
from autopar.pipeline.schedule_program import ScheduleProgram

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a lower float dtype, complex128 for a lower complex one, else the dtype itself."""
    return _WIDER.get(dtype, dtype)


def dtype_of(model: nn.Module) -> torch.dtype:
    """What a model computes in that is not promoted: the dtype of its first parameter or buffer of floats."""
    tensors = (*model.parameters(), *model.buffers())
    return next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)


def promote_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(promoted_dtype(tensor.dtype))


def promote(program: Program) -> Program:
    """`program` with every float dtype among its arguments, inputs constants and values as float64.

    Any form. Run it on promoted inputs, within `default_float64`: ops without a dtype make default floats.
    """
    program = program.copy()
    _promote_graph(program.graph)
    signature = replace(
        program.signature,
        inputs=tuple(_promoted_item(item) for item in program.signature.inputs),
        outputs=tuple(_promoted_item(item) for item in program.signature.outputs),
    )
    constants = {name: promote_tensor(value) for name, value in program.constants.items()}
    return replace(program, signature=signature, constants=constants)


def promote_schedule(program: ScheduleProgram) -> ScheduleProgram:
    """The program with every fragment promoted; the instructions are the same."""
    fragments = {name: replace(fragment, module=_promoted_module(fragment)) for name, fragment in program.fragments.items()}
    buffers = {name: each._replace(type=_promoted_type(each.type)) for name, each in program.buffers.items()}
    return program.with_places(map(_promoted_signature, program.places), fragments=fragments, buffers=buffers)


def _promoted_type(given: TensorType | None) -> TensorType | None:
    return given and (given[0], promoted_dtype(given[1]))


def _promoted_signature(schedule: Schedule) -> Schedule:
    inputs = tuple(_promoted_item(item) for item in schedule.signature.inputs)
    outputs = tuple(_promoted_item(item) for item in schedule.signature.outputs)
    return replace(schedule, signature=replace(schedule.signature, inputs=inputs, outputs=outputs))


_defaults: list[torch.dtype] = []  # before each `default_float64` that is entered: the user's own is the first


@contextmanager
def default_float64(is_on: bool = True) -> Generator[None]:
    """While this is entered, what has no dtype of its own is made in float64; in the user's default dtype if not `is_on`."""
    _defaults.append(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64 if is_on else _defaults[0])
    try:
        yield
    finally:
        torch.set_default_dtype(_defaults.pop())


class Promoting(TorchFunctionMode):
    """While this is entered, whoever asks torch for a lower float dtype gets float64: `.float()`, `.to(torch.float32)`, `dtype=…`.

    Of a model that computes in `dtype` an `rms_norm` without an eps has that of `dtype`, and numbers have the digits that they have in the
    model where a capture makes constants of them: `torch.tensor(0.3)`, `x.new_tensor([0.3])`, `x[0] = 0.3`. Ops that take a number
    (`torch.full`, `fill_`, `masked_fill`) keep it as it is, and so do their promoted nodes.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        # The dtype that a tensor would have in the model, where a call says it.
        self._asked: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_of_numbers(func, args, kwargs):
            return self._of_numbers(func, args, kwargs)
        if func is torch.Tensor.__setitem__ and type(args[2]) is float and args[0].is_floating_point():
            with _Rounding(self._dtype_in_model(args[0])):
                return func(*args)
        if func in _RMS_NORMS:
            args, kwargs = _with_eps(args, kwargs, self.dtype)
        cast = next((dtype for each, dtype in _CASTS if func is each), None)
        promoted = func if cast is None else torch.Tensor.double
        result = promoted(*_promoted_literals(args), **_promoted_literals(kwargs))
        asked = cast or self._like(func, args) or self._in_model(_asked_dtype(args, kwargs))
        return result if asked is None or not isinstance(result, torch.Tensor) else self._remembered(result, asked, args)

    def _remembered(self, result: torch.Tensor, asked: torch.dtype, args: tuple[Any, ...]) -> torch.Tensor:
        """`result`, known to be of dtype `asked` in the model."""
        if any(result is each for each in args) and asked is not self._dtype_in_model(result):
            result = result.clone()  # a cast: what it is given keeps its own dtype, and may be written into by itself
        self._asked[result] = asked
        return result

    def _like(self, func: Callable[..., Any], args: tuple[Any, ...]) -> torch.dtype | None:
        """Where a tensor is cast to what another one has, that dtype in the model."""
        other = next(iter(args[1:]), None) if func in (torch.Tensor.to, torch.Tensor.type_as) else None
        return self._dtype_in_model(other) if isinstance(other, torch.Tensor) else None

    def _of_numbers(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The tensor that the model makes of numbers, promoted."""
        if func in _NEW_OF_NUMBERS:
            args = (args[0].new_empty(0, dtype=self._dtype_in_model(args[0])), *args[1:])
        args, kwargs = pytree.tree_map(self._in_model, (args, kwargs))
        with default_float64(False):
            made = func(*args, **kwargs)
        promoted = promote_tensor(made)
        self._asked[promoted] = made.dtype
        return promoted

    def _in_model(self, argument: Any) -> Any:
        """`argument`, or the model's own dtype for float64, which code finds here that asks a tensor for its dtype."""
        return self.dtype if argument is torch.float64 else argument

    def _dtype_in_model(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that a call asked for where `tensor` was made, else that which the model computes in."""
        return self._asked.get(tensor, self.dtype) if tensor.dtype is torch.float64 else tensor.dtype


class _Rounding(TorchDispatchMode):
    """While this is entered, a number that torch makes a tensor of has the digits of `dtype`.

    `tensor[index] = 0.3` makes one of it, and a capture a constant. Since torch 2.15 it does so where several tensors are the index; else
    it is given to an op as a number. NumPy's numbers are captured in float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lift_fresh.default or not result.is_floating_point():
            return result
        rounded = result.to(self.dtype).to(result.dtype)
        # Too large for the dtype, so the model has another here.
        return rounded if bool(rounded.isfinite()) else result


def _is_of_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call makes a tensor of numbers of Python's or NumPy's, and of no other tensor's."""
    if func in _NEW_OF_NUMBERS:
        return not _has_tensors((args[1:], kwargs))
    return func in _OF_NUMBERS and not _has_tensors((args, kwargs))


def _has_tensors(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(arguments))


def _asked_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """What a call says of the dtype of its result: the one asked for, or the user's default where no tensor is among the arguments."""
    leaves = pytree.tree_leaves((args, kwargs))
    users = _defaults[0] if _defaults else torch.get_default_dtype()
    unsaid = None if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else users
    return next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), unsaid)


def _with_eps(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `rms_norm`, the eps among them that it takes by itself for `dtype`."""
    names = ("input", "normalized_shape", "weight")
    given = dict(zip((*names, "eps"), args, strict=False)) | dict(kwargs)
    eps = given.get("eps")
    return tuple(given[name] for name in names if name in given), {"eps": default_eps(dtype) if eps is None else eps}


_RMS_NORMS = (torch.nn.functional.rms_norm, torch.rms_norm)
_CASTS = (
    (torch.Tensor.double, torch.float64),
    (torch.Tensor.float, torch.float32),
    (torch.Tensor.half, torch.float16),
    (torch.Tensor.bfloat16, torch.bfloat16),
)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_NEW_OF_NUMBERS = (torch.Tensor.new_tensor, torch.Tensor.new)
# The same as the halves of a custom function have them.
_LOWER_METHODS = ("float", "half", "bfloat16")


def _promoted_item(item: Any) -> Any:
    assert isinstance(item, (Input, Output))
    return replace(item, dtype=promoted_dtype(item.dtype))


def _promoted_module(fragment: Fragment) -> GraphModule:
    graph, mapping = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(fragment.module.graph, mapping))
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    _promote_graph(graph)
    return GraphModule(fragment.module, graph)


def _promote_graph(graph: Graph) -> None:
    """Change literals and the dtypes of values, in place. Shapes and strides depend on no dtype, so nothing is run."""
    mode, casts = fake_mode(), set(filter(casts_at_need, graph.nodes))
    for node in graph.nodes:
        if node.target is torch.ops.aten.rms_norm.default:
            node.args, node.kwargs = _with_eps(node.args, node.kwargs, node.meta["val"].dtype)
        if node in casts:
            _let_copy(node)
        node.args, node.kwargs = _promoted_literals(node.args), _promoted_literals(node.kwargs)
        if (function := custom_function(node.target)) is not None:
            node.target = as_function(mapped(function, lambda half: _promote_graph(half.graph)))
        elif node.op == "call_method" and node.target in _LOWER_METHODS:
            node.target = "double"
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda value: _fresh(value, mode), node.meta["val"])


def _let_copy(cast: Node) -> None:
    """Let a cast give new memory, which may be written into by itself, where it has the dtype already."""
    if cast.target is torch.ops.aten.type_as.default:
        cast.target = torch.ops.aten.to.other
    names = [each.name for each in schema_of(cast.target).arguments]
    cast.args, given = cast.args[: names.index("copy")], dict(zip(names, cast.args, strict=False))
    cast.kwargs = {name: given[name] for name in names[len(cast.args) : len(given)]} | dict(cast.kwargs) | {"copy": True}


def _promoted_literals(arguments: Any) -> Any:
    """`arguments`, nested in tuples, lists, dicts and slices, with every dtype promoted."""
    return map_aggregate(arguments, lambda leaf: promoted_dtype(leaf) if isinstance(leaf, torch.dtype) else leaf)


def _fresh(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A promoted fake with the shape and strides of `value`."""
    with mode:
        return empty_as(value, dtype=promoted_dtype(value.dtype), device=value.device)
