"""Private PyTorch API that the compiler uses, behind functions of our own; what captures alone use is in `autopar/frontend/_torch.py`, and
what the runtime does in `runtime/_torch.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions
from torch._dynamo import trace_rules
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, tracing
from torch._library import simple_registry
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributions import constraints
from torch.export import _trace
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "ARE_ALL_TRUE",
    "CAUSAL_MASK_DETECTION",
    "DEPENDENT_CONSTRAINT",
    "DISTRIBUTIONS_CHECKED",
    "FakeTensorMode",
    "HigherOrderOperator",
    "MARKS_DIRTY",
    "MATRIX_CONSTRAINTS",
    "NORM_OF_BATCH",
    "OpOverload",
    "TorchDispatchMode",
    "apply_custom_function",
    "attribute_set",
    "attributes_replaced",
    "by_meta_kernel",
    "compiling",
    "describe_input",
    "describe_output",
    "fake_calls_seen",
    "fake_errors_quiet",
    "fake_mode",
    "fake_mode_of",
    "foreign_parameters_refused",
    "gives_views",
    "has_kernel",
    "is_fake",
    "joint_graph",
    "leaves_behind",
    "outside_fake_modes",
    "pytree",
    "schema_of",
    "without_onednn",
    "writes_operands",
    "written_operands",
]

# Where torch's own functions ask of values: (holder, name), or the classes. Dynamo refuses to look into `is_dependent`.
DEPENDENT_CONSTRAINT = constraints._Dependent
# Since torch 2.15 `distributions` ask a function of their own, which goes on from the other's answer with ops that want a tensor.
_IN_DISTRIBUTIONS = (torch.distributions.distribution, "_all_true_or_runtime_assert")
ARE_ALL_TRUE: list[tuple[Any, str]] = [(torch, "_is_all_true"), *([_IN_DISTRIBUTIONS] if hasattr(*_IN_DISTRIBUTIONS) else [])]
DISTRIBUTIONS_CHECKED = (torch.distributions.Distribution, "_validate_args")
CAUSAL_MASK_DETECTION = (torch.nn.modules.transformer, "_detect_is_causal_mask")
NORM_OF_BATCH = torch.nn.modules.batchnorm._BatchNorm
# Since 2.13 torch says of a `torch.autograd.Function` which results are operands that it wrote into (`mark_dirty`).
MARKS_DIRTY = "dirty_idx" in type(autograd_function_apply).__call__.__code__.co_consts
MATRIX_CONSTRAINTS = (constraints._Symmetric, constraints._PositiveSemidefinite, constraints._PositiveDefinite)
# With oneDNN an LSTM layer on a CPU is one op, which no rank can split. Traces ask this function of torch's which way to go; oneDNN stays
# enabled, since without it torch chooses other kernels for convolutions, too, and their results have other strides than in a run.
_LSTM_IN_STEPS = (decompositions, "select_one_layer_lstm_function", lambda *_: decompositions.one_layer_lstm)


def apply_custom_function(forward: GraphModule, backward: GraphModule, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Run a `torch.autograd.Function` from its halves as Dynamo traced them; autograd sees the backward."""
    return autograd_function_apply(forward, backward, *operands, **options)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes, dtypes and strides but no storage."""
    return FakeTensorMode(allow_non_fake_inputs=True)


# What Python code raises that looks at the values of fake tensors.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def fake_errors_quiet() -> AbstractContextManager[None]:
    """While this is entered, what fails on fake tensors is not logged, whoever handles it."""
    return attribute_set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@contextmanager
def without_onednn(mode: FakeTensorMode) -> Generator[None]:
    """While this is entered, an LSTM layer on a CPU is made of ops that ranks can split, also outside of traces.

    torch keeps what ops give on fake tensors, for all modes, whether or not oneDNN is enabled: what convolutions give here is not kept.
    """
    with attribute_set(torch.backends.mkldnn, "enabled", False), attribute_set(mode, "cache_enabled", False):
        yield


def outside_fake_modes() -> AbstractContextManager[Any]:
    """While this is entered the caller's fake mode, if there is one, is not active: tensors that are made have values."""
    return unset_fake_temporarily()


def by_meta_kernel(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """What the meta kernel of `target` makes of fake tensors, as one on `device`; None where that is no new tensor."""
    with in_kernel_invocation_manager(mode):
        found = target(*args, **kwargs)
    return FakeTensor(mode, found, device) if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def schema_of(target: object) -> Any:
    """The `FunctionSchema` of an op: its arguments and results, and which share memory; None for what is no op, as `operator.getitem`."""
    return getattr(target, "_schema", None)


def writes_operands(target: object) -> bool:
    """Whether `target` is an op that writes into an operand."""
    schema = schema_of(target)
    return schema is not None and schema.is_mutable


def written_operands(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors, or nodes, that a call of an op writes into; of what is no op nothing is known."""
    found: list[Any] = []
    for number, argument in enumerate(schema_of(op).arguments if writes_operands(op) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [each for each in found if isinstance(each, (torch.Tensor, Node))]


def gives_views(op: OpOverload) -> bool:
    """Whether a result of `op` shows the memory of an operand."""
    return any(result.alias_info for result in schema_of(op).returns)


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether `op` has a kernel of its own under a dispatch key: "AutocastCUDA", "CompositeImplicitAutograd" (it is made of other ops)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def fake_mode_of(tensor: torch.Tensor) -> FakeTensorMode:
    assert isinstance(tensor, FakeTensor)
    return tensor.fake_mode


def joint_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], mode: FakeTensorMode, decompositions: dict[Any, Callable[..., Any]]
) -> tuple[Graph, list[Any], list[Any]]:
    """Trace forward and backward of `function` (a tuple of tensors out) by AOTAutograd.

    Returns the functional ATen graph with the descriptors of its placeholders and of its results. An input's
    `requires_grad` decides whether it gets a gradient.
    """

    class Callee(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> Any:
            return function(*arguments)

    with ExitStack() as stack:
        contexts = (tracing(TracingContext(mode)), mode, torch.enable_grad(), _errors_unchecked(), attribute_set(*_LSTM_IN_STEPS))
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(preserve_node_meta())
        joint = aot_export_joint_with_descriptors(stack, Callee(), tuple(inputs), decompositions=decompositions)
        graph = joint.graph_module.graph
    into = [node.meta["desc"] for node in graph.nodes if node.op == "placeholder"]
    return graph, into, list(graph.output_node().meta["desc"])


def leaves_behind(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from `tensor` reaches."""
    if tensor.grad_fn is None:
        return [tensor]
    found, seen, pending = list[torch.Tensor](), set[Any](), [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function not in seen:
            seen.add(function)
            if (leaf := getattr(function, "variable", None)) is not None:
                found.append(leaf)
            pending += [following for following, _ in function.next_functions if following is not None]
    return found


def describe_input(descriptor: Any) -> tuple[str, int]:
    """("input", position) of an argument, ("tangent", position of the output it belongs to), or ("mutation tangent", position of the
    argument that is written)."""
    if isinstance(descriptor, PlainAOTInput):
        return "input", descriptor.idx
    assert isinstance(descriptor, TangentAOTInput), descriptor
    kind, position = describe_output(descriptor.output)
    return "mutation tangent" if kind == "mutation" else "tangent", position


def describe_output(descriptor: Any) -> tuple[str, int]:
    """("output", position), ("gradient", position of the input) or ("mutation", position of the input)."""
    if isinstance(descriptor, PlainAOTOutput):
        return "output", descriptor.idx
    if isinstance(descriptor, GradAOTOutput):
        return "gradient", describe_input(descriptor.grad_of)[1]
    assert isinstance(descriptor, InputMutationAOTOutput), descriptor
    return "mutation", describe_input(descriptor.mutated_input)[1]


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Generator[None]:
    """While this is entered, `owner.name` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def min_cut_graphs(model: torch.nn.Module, share: float) -> Callable[..., Any]:
    """`model` as two graphs, traced at its first call and run op by op, between which torch's min-cut partitioner keeps at most `share` of
    the activations that it would. What is read for the last time is let go of."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_module
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return min_cut_rematerialization_partition(*args, **kwargs)

    return aot_module(model, boxed_nop, boxed_nop, partition_fn=partition)


@contextmanager
def attributes_replaced(replaced: Sequence[tuple[Any, str, Any]]) -> Generator[None]:
    """While this is entered, (holder, name, by): `by` is what Dynamo finds, and traces, under `name` of `holder`."""
    # Dynamo looks up once, by name, what it must not trace: what is there now, not what stands for it.
    trace_rules.get_torch_obj_rule_map()
    with ExitStack() as stack:
        for holder, name, by in replaced:
            stack.enter_context(mock.patch.object(holder, name, by))
        yield


@contextmanager
def _errors_unchecked() -> Generator[None]:
    """While this is entered, the check inside functions of `torch.linalg` (`matrix_power` to a negative one) is an op without effects.

    An effect would add tokens to the inputs and outputs of the joint graph, which no program has a place for.
    """
    effect = getattr(simple_registry.singleton.find("aten::_linalg_check_errors"), "effect", None)
    before = getattr(effect, "effect", None)
    if effect is None or before is None:
        yield
        return
    effect.register(None)
    try:
        yield
    finally:
        effect.register(before)


def foreign_parameters_refused() -> AbstractContextManager[None]:
    """While this is entered, `torch.export` ends with a KeyError of its name at a parameter that is none of the module's that it exports.

    So it does before torch 2.15, which makes a constant of it: nobody gets a gradient of that.
    """
    name = "_rewrite_dynamo_tensor_constants"
    original = getattr(_trace, name)

    def rewrite(*args: Any, **options: Any) -> Any:
        state = options.get("traced_mod_state", {})  # of other names before torch 2.15, and of buffers alone
        for spec in options["graph_signature"].input_specs if state else ():
            if spec.kind is InputKind.PARAMETER and state[spec.target] not in options["orig_mod_state"]:
                raise KeyError(spec.target)
        return original(*args, **options)

    return attribute_set(_trace, name, rewrite)


def fake_calls_seen(by: Callable[[Callable[..., Any], Any, Any, Any], Any]) -> AbstractContextManager[None]:
    """While this is entered, a call on fake tensors gives what `by(compute, op, args, kwargs)` does; `compute` does as torch does."""
    dispatch = FakeTensorMode.dispatch

    def seen(mode: FakeTensorMode, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return by(lambda op, args, kwargs: dispatch(mode, op, types, args, kwargs), op, args, kwargs or {})

    return attribute_set(FakeTensorMode, "dispatch", seen)


def compiling() -> AbstractContextManager[None]:
    """While this is entered, `torch.compiler.is_compiling()` is true, as it is for what Dynamo traces."""
    return attribute_set(torch.compiler, "_is_compiling_flag", True)
