"""Inputs and outputs of every kind, through a whole call on virtual ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

from autopar.driver.compiled import TENSOR, Compiled
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import Sharding
from autopar.runtime._torch import flatten
from autopar.runtime.execute.random_key import random_key
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.schedules import schedule_of, whole

F32, I64 = torch.float32, torch.int64
ROWS, WHOLE = Sharding((("dp",), ())), Sharding(((),))


class Counting(nn.Module):
    """Returns (x * scale + offset, its own count, a string); counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.count = nn.Buffer(torch.zeros(1))


def compiled(mesh: Mesh, schedule: Schedule, signature: Signature) -> Compiled:
    program = Program(Graph(), mesh, signature, Form.LOCAL, {"offset": torch.tensor([10.0, 20.0])})
    return Compiled.of(program, program, program, whole(program.mesh, schedule))


def counting(mesh: Mesh) -> ParallelModule:
    """Every kind of input, a buffer written back, an output without a loss that takes a tangent."""
    dims, width = ((4,), (2,)), ((2,),)
    signature = Signature(
        (
            Input("parameter", "scale", (2,), F32, True, width, WHOLE),
            Input("buffer", "count", (1,), F32, False, ((),), Sharding(())),
            Input("constant", "offset", (2,), F32, False, width, WHOLE),
            Input("batch", "0", (4, 2), F32, False, dims, ROWS),
            Input("random_key", "", (), I64),
            Input("coordinate", "dp", (), I64),
            Input("tangent", "0", (4, 2), F32, False, dims, ROWS),
        ),
        (
            Output("output", "0", (4, 2), F32, True, dims, ROWS),
            Output("buffer", "count", (1,), F32, False, ((),), Sharding(())),
            Output("output", "2", (2,), I64, False, width, Sharding((("dp",),))),
            Output("gradient", "scale", (2,), F32, False, width, WHOLE),
        ),
        flatten((0, "text", 0))[1],
        (TENSOR, "text", TENSOR),
    )
    text = """
    RUN forward (scale, count, offset, x, key, index) -> (out, new_count, draws)
    PAUSE
    RUN backward (x, tangent) -> (partial)
    LAUNCH all_reduce sum dp (partial) -> gradient
    WAIT gradient
    """

    def forward(scale: Any, count: Any, offset: Any, x: Any, key: Any, index: Any) -> Any:
        return x * scale + offset, count + 1, (key + index).view(1)

    def backward(x: Any, tangent: Any) -> Any:
        return ((x * tangent).sum(0),)

    inputs, outputs = "scale count offset x key index tangent", "out new_count draws gradient"
    schedule = schedule_of(text, inputs, outputs, signature, forward=forward, backward=backward)
    return ParallelModule(Counting(), mesh, capture=lambda args, kwargs, pins, shares: compiled(mesh, schedule, signature), backend="eager")


def test_inputs_of_every_kind_and_a_loss_of_the_users_own() -> None:
    torch.manual_seed(5)
    parallel, x = counting(virtual_mesh(dp=2)), torch.randn(4, 2)
    out, text, draws = parallel(x)
    torch.testing.assert_close(out, x * torch.tensor([2.0, 3.0]) + torch.tensor([10.0, 20.0]))
    key = random_key(5, 1)
    assert text == "text" and draws.tolist() == [key, key + 1] and not draws.requires_grad
    (out**2).sum().backward()
    torch.testing.assert_close(parallel.scale.grad, (2 * out * x).sum(0).detach())


def test_buffers_are_written_back_and_keys_follow_the_step() -> None:
    parallel, x = counting(virtual_mesh(dp=2)), torch.randn(4, 2)
    keys = [int(parallel(x)[2][0]) for _ in range(3)]
    assert parallel._model.get_buffer("count").tolist() == [3] and len(set(keys)) == 3
    parallel.eval()
    keys += [int(parallel(x)[2][0]) for _ in range(2)]
    assert len(set(keys)) == 5  # what draws in eval draws anew, too


def test_changing_an_output_in_place_does_not_change_the_backward() -> None:
    parallel, x = counting(virtual_mesh(dp=2)), torch.randn(4, 2)
    kept = x.clone()
    out = parallel(x)[0]
    out.mul_(0)
    x.add_(1)
    out.backward(torch.ones(4, 2))
    torch.testing.assert_close(parallel.scale.grad, kept.sum(0) * 0)


def test_gradients_share_no_memory() -> None:
    """Two parameters whose gradients are one buffer: scaling one must not scale the other."""
    mesh = virtual_mesh(dp=1)
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
    width = ((2,),)
    signature = Signature(
        (
            Input("parameter", "a", (2,), F32, True, width, WHOLE),
            Input("parameter", "b", (2,), F32, True, width, WHOLE),
            Input("tangent", "0", (2,), F32, False, width, WHOLE),
        ),
        (
            Output("output", "0", (2,), F32, True, width, WHOLE),
            Output("gradient", "a", (2,), F32, False, width, WHOLE),
            Output("gradient", "b", (2,), F32, False, width, WHOLE),
        ),
        flatten(0)[1],
        (TENSOR,),
    )
    text = "RUN forward (a, b) -> (out)\nPAUSE"
    schedule = schedule_of(text, "a b tangent", "out tangent tangent", signature, forward=lambda a, b: (a + b,))
    parallel = ParallelModule(model, mesh, capture=lambda args, kwargs, pins, shares: compiled(mesh, schedule, signature), backend="eager")
    tangent = torch.ones(2)
    parallel().backward(tangent)
    first, second = (parameter.grad for parameter in parallel.parameters())
    assert first is not None and second is not None
    assert len({tensor.untyped_storage().data_ptr() for tensor in (first, second, tangent)}) == 3


def test_gradients_reach_whoever_asks_for_them() -> None:
    """A hook, autograd.grad, a sum with what was there or comes another way: as with a plain module."""
    parallel, x = counting(virtual_mesh(dp=2)), torch.randn(4, 2)
    scale, wanted, seen = parallel.scale, x.sum(0), list[torch.Tensor]()

    def loss() -> torch.Tensor:
        return parallel(x)[0].sum()

    torch.testing.assert_close(torch.autograd.grad(loss(), [scale])[0], wanted)
    assert scale.grad is None, "autograd.grad hands it out"
    other = torch.ones(2, requires_grad=True)
    (loss() + (other * x).sum()).backward(inputs=[other])
    assert scale.grad is None and other.grad is not None, "left out"
    loss().backward()
    torch.testing.assert_close(scale.grad, wanted)
    (loss() + loss() + (scale * 3).sum()).backward()
    torch.testing.assert_close(scale.grad, 3 * wanted + 3)
    for register in (scale.register_hook, scale.register_post_accumulate_grad_hook):
        scale.grad = None
        handle = register(lambda tensor: seen.append(tensor.clone().detach()))
        loss().backward()
        handle.remove()
        torch.testing.assert_close(scale.grad, wanted)
    assert len(seen) == 2
    scale.grad = None
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        (loss() * torch.nan).backward()
