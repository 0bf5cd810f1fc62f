"""Private torch API, all of the core's, behind names of our own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo import functional_export
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.autograd_function import AutogradFunctionApply, autograd_function_apply
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._library import simple_registry
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "apply_custom_function",
    "by_meta_kernel",
    "compiling",
    "constraints_unchecked",
    "custom_functions_replaced",
    "describe_input",
    "describe_output",
    "fake_mode",
    "fake_mode_of",
    "is_fake",
    "joint_graph",
    "pytree",
]

_CONSTRAINT_CHECK = "_suggest_or_raise_constraint_violation"


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes, dtypes and strides but no storage."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def by_meta_kernel(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """What the meta kernel of `target` makes of fake tensors, as one on `device`; None where that is no new tensor."""
    with in_kernel_invocation_manager(mode):
        found = target(*args, **kwargs)
    return FakeTensor(mode, found, device) if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


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
        contexts: tuple[AbstractContextManager[Any], ...] = (tracing(TracingContext(mode)), mode, torch.enable_grad(), _errors_unchecked())
        for context in contexts:
            stack.enter_context(context)
        stack.enter_context(preserve_node_meta())
        joint = aot_export_joint_with_descriptors(stack, Callee(), tuple(inputs), decompositions=decompositions)
        graph = joint.graph_module.graph
    into = [node.meta["desc"] for node in graph.nodes if node.op == "placeholder"]
    return graph, into, list(graph.output_node().meta["desc"])


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


def apply_custom_function(forward: GraphModule, backward: GraphModule, operands: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Run a `torch.autograd.Function` from its halves as Dynamo traced them; autograd sees the backward."""
    return autograd_function_apply(forward, backward, *operands, **options)


@contextmanager
def custom_functions_replaced(by: Callable[[GraphModule, GraphModule, Sequence[Any], Mapping[str, Any]], Any]) -> Generator[None]:
    """While this is entered, `by(forward, backward, operands, options)` stands for each custom function that is traced into a graph.

    Dynamo's own runs, which learn whether results require gradients, see the real thing.
    """
    original = AutogradFunctionApply.__call__

    def call(self: AutogradFunctionApply, fwd: GraphModule, bwd: GraphModule, *operands: Any, **options: Any) -> Any:
        if get_proxy_mode() is None:
            return original(self, fwd, bwd, *operands, **options)
        return by(fwd, bwd, operands, options)

    AutogradFunctionApply.__call__ = call
    try:
        yield
    finally:
        AutogradFunctionApply.__call__ = original


@contextmanager
def checkpoints_called(note: Callable[[], None]) -> Generator[None]:
    """While this is entered, what is under `torch.utils.checkpoint` is traced as a plain call; `note` is called for each."""
    original = TagActivationCheckpoint.__call__

    def call(self: TagActivationCheckpoint, gmod: GraphModule, *operands: Any, **options: Any) -> Any:
        if get_proxy_mode() is not None:
            note()
        # With its calls' own lines and modules, not those of the checkpoint.
        with preserve_node_meta():
            return Interpreter(gmod).run(*operands)

    TagActivationCheckpoint.__call__ = call
    try:
        yield
    finally:
        TagActivationCheckpoint.__call__ = original


@contextmanager
def _errors_unchecked() -> Generator[None]:
    """While this is entered, the check behind `torch.linalg.inv` and its like has no effect that tokens would order.

    Tokens are inputs and outputs of their own, and the check itself has no result.
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


@contextmanager
def compiling() -> Generator[None]:
    """While this is entered, `torch.compiler.is_compiling()` is true, as it is for what Dynamo traces."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def constraints_unchecked() -> Generator[None]:
    """While this is entered, `torch.export` does not check its dynamic dims against what it traced.

    The check writes the guards of all shapes as text, which takes a quarter of an export. Only for exports without dynamic dims.
    """
    original = getattr(functional_export, _CONSTRAINT_CHECK, None)
    if original is None:
        yield
        return
    setattr(functional_export, _CONSTRAINT_CHECK, lambda *_: None)
    try:
        yield
    finally:
        setattr(functional_export, _CONSTRAINT_CHECK, original)
