"""Private PyTorch API that captures use: what Dynamo and `torch.export` do otherwise while a model is traced."""

from __future__ import annotations

import itertools
import operator
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo import functional_export
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import get_real_value
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable, builder, user_defined
from torch._dynamo.variables import builtin as builtin_variables
from torch._dynamo.variables import tensor as tensor_variables
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import GetAttrVariable, NumpyVariable, get_np_to_tnp_map
from torch._functorch.autograd_function import AutogradFunctionApply
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from autopar._torch import OpOverload, attribute_set, schema_of

try:  # since torch 2.13
    from torch._higher_order_ops import register_hook

    _hook_op: Any = register_hook.RegisterHookOp
except ImportError:
    _hook_op = None
# A hook that forward registers on a tensor is a `torch.autograd.Function` of Dynamo's to a trace, not an op.
HOOKS_ARE_FUNCTIONS = _hook_op is None

aten = torch.ops.aten

_CONSTRAINT_CHECK = "_suggest_or_raise_constraint_violation"


def custom_functions_replaced(
    by: Callable[[GraphModule, GraphModule, Sequence[Any], Mapping[str, Any]], Any],
) -> AbstractContextManager[None]:
    """While this is entered, `by(forward, backward, operands, options)` stands for each custom function that is traced into a graph.

    Dynamo's own runs, which learn whether results require gradients, see the real thing.
    """
    original = AutogradFunctionApply.__call__

    def call(self: AutogradFunctionApply, fwd: GraphModule, bwd: GraphModule, *operands: Any, **options: Any) -> Any:
        if get_proxy_mode() is None:
            return original(self, fwd, bwd, *operands, **options)
        return by(fwd, bwd, operands, options)

    return attribute_set(AutogradFunctionApply, "__call__", call)


@contextmanager
def hooks_replaced(by: Callable[[GraphModule, torch.Tensor, Sequence[Any]], torch.Tensor], note: Callable[[str], None]) -> Generator[None]:
    """While this is entered, `by(hook, tensor, others)` stands for each hook on an intermediate value that is traced into a graph.

    `hook(gradient, *others)` is a graph. `note` is called with the source of each leaf, a parameter or an input, that gets a hook. Releases
    of torch whose Dynamo cannot trace hooks refuse them on intermediate values.
    """
    registered = SideEffects.register_hook

    def call(self: Any, tensor: torch.Tensor, hook: GraphModule, *others: Any) -> torch.Tensor:
        return original(self, tensor, hook, *others) if get_proxy_mode() is None else by(hook, tensor, others)

    def register(self: SideEffects, tensor: Any, *args: Any) -> Any:
        note(str(getattr(tensor.source, "name", tensor.source)))
        return registered(self, tensor, *args)

    with ExitStack() as stack:
        stack.enter_context(attribute_set(SideEffects, "register_hook", register))
        if _hook_op is not None:
            original = _hook_op.__call__
            stack.enter_context(attribute_set(_hook_op, "__call__", call))
        yield


def data_detached() -> AbstractContextManager[None]:
    """While this is entered, Dynamo traces `tensor.data` as `tensor.detach()`: of `.data` the export makes a constant."""
    return attribute_set(torch._C._autograd, "_get_data_attr", torch.detach)  # type: ignore[attr-defined]


@contextmanager
def variables_traced(by: Callable[..., torch.Tensor]) -> Generator[None]:
    """While this is entered, Dynamo traces `torch.autograd.Variable(...)` as a call of `by`; of the class it knows nothing."""
    owner = user_defined.UserDefinedClassVariable
    called = owner.call_function

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.autograd.Variable:
            return UserFunctionVariable(by).call_function(tx, args, kwargs)
        return called(self, tx, args, kwargs)

    with attribute_set(owner, "call_function", call):
        yield


@contextmanager
def asking_for_gradients_ignored() -> Generator[None]:
    """While this is entered, Dynamo passes over `x.requires_grad = True` and `x.requires_grad_()` of what forward computes from inputs: the
    gradient that `x` asks for is one that nobody gets. Whoever asks finds that it requires one, and so does what is made of it."""
    traced = tensor_variables.TensorVariable
    # Before torch 2.13 it was a method of another class.
    owner = getattr(builtin_variables, "SetAttrBuiltinVariable", builtin_variables.BuiltinVariable)
    method = "_call_setattr" if hasattr(owner, "_call_setattr") else "call_setattr"
    set_attribute, ask = getattr(owner, method), traced.method_requires_grad_

    def passes(tensor: Any, value: Any) -> bool:
        is_true = value is True or (value.is_python_constant() and value.as_python_constant() is True)
        if not is_true or tensor.source is not None:  # a parameter would be trained from there on, an input comes from outside
            return False
        tensor.as_proxy().node.meta["example_value"].requires_grad_()
        tensor.requires_grad = True
        return True

    def setting(self: Any, tx: Any, tensor: Any, name: Any, value: Any) -> Any:
        is_asked = isinstance(tensor, traced) and name.is_python_constant() and name.as_python_constant() == "requires_grad"
        return value if is_asked and passes(tensor, value) else set_attribute(self, tx, tensor, name, value)

    def asking(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        return self if passes(self, requires_grad) else ask(self, tx, requires_grad)

    with ExitStack() as stack:
        stack.enter_context(attribute_set(owner, method, setting))
        stack.enter_context(attribute_set(traced, "method_requires_grad_", asking))
        # Since torch 2.15 methods are found in a table.
        table: dict[str, Any] = getattr(traced, "tp_methods", {})
        if "requires_grad_" in table:
            stack.enter_context(mock.patch.dict(table, {"requires_grad_": type(table["requires_grad_"])(asking)}))
        yield


def checkpoints_called() -> AbstractContextManager[None]:
    """While this is entered, what is under `torch.utils.checkpoint` is traced as a plain call.

    Each call that is traced there has the number of its region, the outermost, under torch's own name for it.
    """
    numbers, inside = itertools.count(), list[int]()

    def call(self: TagActivationCheckpoint, gmod: GraphModule, *operands: Any, **options: Any) -> Any:
        is_outermost = get_proxy_mode() is not None and not inside
        if is_outermost:
            inside.append(next(numbers))
        for module in gmod.modules():
            for node in module.graph.nodes if isinstance(module, GraphModule) and inside else ():
                node.meta["ac_graph_id"] = inside[0]
        try:
            # With its calls' own lines and modules, not those of the checkpoint.
            with preserve_node_meta():
                return Interpreter(gmod).run(*operands)
        finally:
            if is_outermost:
                inside.clear()

    return attribute_set(TagActivationCheckpoint, "__call__", call)


@contextmanager
def exports_let_go() -> Generator[None]:
    """When the context ends what `torch.export` has put into a module of Dynamo's is taken out again: functions that hold the graph, and
    with it all parameters of the model, for as long as the process lives."""
    names = functional_export.__dict__
    before = set(names)
    try:
        yield
    finally:
        for name in [name for name in names if name.startswith("__compiled_fn") and name not in before]:
            del names[name]


def constraints_unchecked() -> AbstractContextManager[None]:
    """While this is entered, `torch.export` does not check its dynamic dims against what it traced.

    The check writes the guards of all shapes as text, which takes a quarter of an export. Only for exports without dynamic dims.
    """
    is_there = hasattr(functional_export, _CONSTRAINT_CHECK)
    return attribute_set(functional_export, _CONSTRAINT_CHECK, lambda *_: None) if is_there else nullcontext()


@contextmanager
def parameters_not_copied() -> Generator[None]:
    """While this is entered, Dynamo copies a parameter that it exports when its values are asked for: else it copies each twice.

    Under a transform of torch.func it does as ever: there a copy fails, and that is what refuses a module with parameters.
    """
    copied, value_of = builder._clone_input, get_real_value

    def kept(value: Any, mode: Any) -> Any:
        is_plain = type(value) is torch.nn.Parameter and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
        return value if is_plain else copied(value, mode)

    def copied_value_of(node: Any, tracer: Any) -> Any:
        asked = {each: value for each, value in tracer.real_value_cache.items() if type(value) is torch.nn.Parameter}
        tracer.real_value_cache.update({each: copied(value, None) for each, value in asked.items()})
        return value_of(node, tracer)

    with attribute_set(builder, "_clone_input", kept), attribute_set(tensor_variables, "get_real_value", copied_value_of):
        yield


@contextmanager
def masked_reads_open(mode: FakeTensorMode, takes_up: Callable[[OpOverload], bool]) -> Generator[Callable[[Any], None]]:
    """While this is entered `x[mask]` of tensors of `mode` is a tensor, of a length that nobody knows, for ops that `takes_up` names.

    Any other op that takes it, or its length, raises what `x[mask]` raises elsewhere, and so does whoever asks how long it is. So does what
    is yielded, for all tensors and numbers in what it is given.
    """
    shapes, dispatch, reads = ShapeEnv(), mode.dispatch, dict[str, traceback.StackSummary]()

    def refuse(value: Any) -> None:
        size = next(iter(_unknown_sizes(value)), None) if reads else None
        if size is not None:
            error: Any = DynamicOutputShapeException(aten.nonzero.default)
            error.real_stack = reads.get(str(size))  # where it was read
            raise error

    def call(func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_inside = mode.shape_env is shapes
        is_read = func is aten.index.Tensor and any(
            getattr(each, "dtype", None) == torch.bool for each in pytree.tree_leaves((args[1:], kwargs))
        )
        if is_inside or not (is_read or (reads and _unknown_sizes((args, kwargs)))):
            return dispatch(func, types, args, kwargs or {})
        if not (takes_up(func) or _gives_no_tensor(func)):
            refuse((args, kwargs))
        # What is kept of calls for others knows of no such sizes.
        with attribute_set(mode, "shape_env", shapes), attribute_set(mode, "cache_enabled", False):
            try:
                result = dispatch(func, types, args, kwargs or {})
            except RuntimeError:  # some ops want numbers for sizes, and say so in words of torch's own
                refuse((args, kwargs))
                raise
        for size in _unknown_sizes(result) if is_read else ():
            reads.setdefault(str(size), traceback.extract_stack())
        return result

    with attribute_set(mode, "dispatch", call):
        try:
            yield refuse
        except GuardOnDataDependentSymNode as error:
            raise DynamicOutputShapeException(aten.nonzero.default).with_traceback(error.__traceback__) from error


def _gives_no_tensor(func: OpOverload) -> bool:
    """So it is of what torch itself asks of any tensor: its device, its strides."""
    return not any("Tensor" in str(each.type) for each in schema_of(func).returns)


def _unknown_sizes(value: Any) -> list[Any]:
    leaves = pytree.tree_leaves(value)
    sizes = [size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
    return [size for size in sizes if isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat))]


class _NumPyNumber(ConstantVariable):
    """A number of NumPy: to ops it is Python's, of which `np.float64` is one, and to `isinstance` and `type` what it is."""

    def __init__(self, value: Any, number: Any = None, **options: Any) -> None:
        super().__init__(value, **options)
        self.number = number

    def python_type(self) -> type:
        return type(self.number)

    def as_proxy(self) -> Any:
        return self.number if isinstance(self.number, float) else self.value

    def as_python_constant(self) -> Any:
        # What folds constants computes with it: of a flag `~` is another one, and -2 of Python's; single precision is rounded to.
        return self.number if type(self.number) in (np.bool_, np.float32) else self.value

    def var_getattr(self, tx: Any, name: str) -> Any:
        is_method = callable(getattr(self.number, name, None))
        return GetAttrVariable(self, name) if is_method else super().var_getattr(tx, name)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = _numbers_of(args, kwargs)
        found = None if given is None else _variable_of(getattr(self.number, name)(*given[0], **given[1]))
        return super().call_method(tx, name, args, kwargs) if found is None else found


# Others (uint8, half precision) stay with torch, which says what it cannot do.
_HELD = (np.float64, np.float32, np.int64, np.bool_)
_OPERATORS = (
    "add sub mul truediv floordiv mod pow lshift rshift and_ or_ xor "
    "iadd isub imul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor "
    "neg pos abs invert eq ne lt le gt ge is_ is_not"
)
_TAKES_LISTS = (max, min)
# What NumPy computes otherwise than Python: a large integer wraps, `~` of a flag is another flag, single precision is rounded to.
_COMPUTES = {*(getattr(operator, name) for name in _OPERATORS.split()), abs, round, divmod, pow, *_TAKES_LISTS}


def _number(value: Any, **options: Any) -> _NumPyNumber:
    return _NumPyNumber(value.item(), value, **options)


def _variable_of(found: Any) -> Any:
    """What Dynamo knows of a number, Python's or NumPy's; None of anything else."""
    if type(found) in (bool, int, float):
        return ConstantVariable.create(found)
    return _number(found) if type(found) in _HELD else None


def _numbers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a call where Dynamo knows all of them."""
    if not all(each.is_python_constant() for each in (*args, *kwargs.values())):
        return None

    def value(each: Any) -> Any:
        each = each.realize()
        if isinstance(each, BaseListVariable):
            items = [value(item) for item in each.items]
            return items if each.python_type() is list else tuple(items)
        return each.number if isinstance(each, _NumPyNumber) else each.as_python_constant()

    return [value(each) for each in args], {name: value(each) for name, each in kwargs.items()}


def _computed_at_once(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """What NumPy makes of numbers and shapes, where it is a number: torch makes a tensor of it, whose value no graph knows."""
    is_pure = get_np_to_tnp_map().get(self.value) is not None and getattr(self.value, "__self__", None) is None  # random's have a generator
    given = _numbers_of(args, kwargs) if is_pure else None
    found = None if given is None else self.value(*given[0], **given[1])
    return _number(found) if type(found) in _HELD else _called_as_ever(self, tx, args, kwargs)


_called_as_ever, _handler_as_ever = NumpyVariable.call_function, builtin_variables.BuiltinVariable._make_handler


def _handler(function: Any, kinds: list[type], has_kwargs: bool) -> Any:
    """How Dynamo calls an operator, or a function like one, with operands of these kinds: NumPy's numbers are computed with by NumPy."""
    as_ever: Any = _handler_as_ever(function, kinds, has_kwargs)
    if function not in _COMPUTES or not (_NumPyNumber in kinds or function in _TAKES_LISTS):
        return as_ever

    def handler(tx: Any, args: Any, kwargs: Any) -> Any:
        given = _numbers_of(args, kwargs)
        found = None
        if given is not None and any(isinstance(each, np.generic) for each in pytree.tree_leaves(given)):
            try:
                found = _variable_of(function(*given[0], **given[1]))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise_observed_exception(type(error), tx, args=list(error.args))
        return as_ever(tx, args, kwargs) if found is None else found

    return handler


@contextmanager
def numpy_kept() -> Generator[None]:
    """While this is entered, numbers of NumPy that a model holds, or makes of numbers, are Python's in what is exported, and arrays that it
    holds constants with their values.

    Torch makes inputs of the graph of them, and then constants of the fake tensors that stood for these, which hold nothing.
    """
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of each fake tensor; it is kept, so that its id stays its own
    wrapped, transformer = builder.VariableBuilder.__call__, functional_export.DynamoGraphTransformer
    placed, builtin = transformer.placeholder, builtin_variables.BuiltinVariable

    def wrap(self: Any, value: Any) -> Any:
        if type(value) in _HELD:
            return _number(value, source=self.source)
        variable: Any = wrapped(self, value)
        if type(value) is np.ndarray:
            fake = variable.proxy.node.meta["example_value"]
            # In the same memory, so that what the user writes there is seen, as in a tensor.
            values[id(fake)] = fake, torch.from_numpy(value if value.flags.writeable else value.copy())
        return variable

    def place(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        result: Any = placed(self, target, args, kwargs)
        if result.node.op == "get_attr" and (found := values.get(id(self.current_node.meta.get("example_value")))):
            self.module.register_buffer(result.node.target, found[1])
        return result

    with (
        attribute_set(builder.VariableBuilder, "__call__", wrap),
        attribute_set(transformer, "placeholder", place),
        attribute_set(NumpyVariable, "call_function", _computed_at_once),
        mock.patch.object(builtin, "_make_handler", staticmethod(_handler)),
        attribute_set(builtin, "call_function_handler_cache", {}),
    ):
        yield
