"""What every op of ours must survive: opcheck, eager, make_fx, torch.export and torch.compile, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


def assert_traceable(op: Any, arguments: Sequence[Any], options: dict[str, Any], backward: str | None = None) -> None:
    """`op(*arguments, **options)` in every way there is to run it; as one node where it is traced.

    `backward` names the op that its backward must be. Arguments that require gradients get the same ones compiled.
    """
    torch.compiler.reset()
    torch.library.opcheck(op, tuple(arguments), options)

    def call(*tensors: Any) -> Any:
        return op(*tensors, **options)

    detached = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]
    eager = flat(call(*detached))
    name = str(op)
    traced = make_fx(call)(*detached)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_function" and "autopar" in str(node.target)] == [name]
    assert_equal(flat(traced(*detached)), eager)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return call(*tensors)

    exported = torch.export.export(Module(), tuple(detached))
    assert name in [str(node.target) for node in exported.graph.nodes]
    assert_equal(flat(exported.module()(*detached)), eager)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_equal(flat(compiled(*detached)), eager)
    if backward is not None:
        assert_same_gradients(call, compiled, arguments)
        assert backward in joint_ops(call, arguments)


def assert_same_gradients(call: Callable[..., Any], compiled: Callable[..., Any], arguments: Sequence[Any]) -> None:
    def gradients(function: Callable[..., Any]) -> list[Tensor]:
        leaves = [argument for argument in arguments if isinstance(argument, Tensor) and argument.requires_grad]
        results = [result for result in flat(function(*arguments)) if result.requires_grad]
        weights = [torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape) for result in results]
        return list(torch.autograd.grad(results, leaves, weights))

    assert_equal(gradients(compiled), gradients(call))


def joint_ops(call: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    """The ops of forward and backward together, as make_fx sees them."""

    def both(*tensors: Any) -> list[Tensor]:
        leaves = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]
        results = [result for result in flat(call(*tensors)) if result.requires_grad]
        return list(torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results]))

    return [str(node.target) for node in make_fx(both)(*arguments).graph.nodes]


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [result for result in results if result is not None]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
