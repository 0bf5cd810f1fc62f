"""Logits that take too much memory are never whole: which are, which are not and why, and that the loss stays what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.cross_entropy import cross_entropy
from autopar.kernels.projected_cross_entropy import projected_cross_entropy
from autopar.passes.forward.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.forward.fuse_projection import FuseProjection

CLASSES, WIDTH = 11, 4
Compute = Callable[["Head", Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self, compute: Compute, bias: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.compute = compute

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.compute(self, self.first(x), labels)


def flat(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.head(x).view(-1, CLASSES), labels.view(-1))


def shifted(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head.head(x)[:, :-1].contiguous().view(-1, CLASSES).float(), labels[:, 1:].reshape(-1))


def read_twice(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    logits = head.head(x)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)) + logits.square().mean()


def scaled(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(2 * head.head(x).view(-1, CLASSES), labels.view(-1))


def onto_one(head: Head, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, head.head.weight[0]), labels[:, 0] % 5)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 5, WIDTH), torch.randint(0, CLASSES, (3, 5))


def fused(model: nn.Module, capacity_bytes: float = 0.0) -> tuple[FusionDecision, Program]:
    program = capture(model, inputs(), {}, virtual_mesh(dp=1), outputs="all")
    losses = FuseCrossEntropy()
    program = losses.apply(program, losses.decide(program))
    projection = FuseProjection(capacity_bytes)
    decision = projection.decide(program)
    return decision, projection.apply(program, decision)


@pytest.mark.parametrize("compute", [flat, shifted])
def test_logits_are_made_in_chunks(compute: Compute) -> None:
    model = Head(compute)
    decision, program = fused(model)
    targets = [node.target for node in program.graph.nodes]
    assert decision.fused and projected_cross_entropy in targets and cross_entropy not in targets
    assert not any(
        tuple(node.meta["val"].shape)[-1:] == (CLASSES,) for node in program.graph.nodes if node.target is torch.ops.aten.linear.default
    )
    state = dict(model.named_parameters())
    got = program.module()(*(state[item.name] for item in program.signature.inputs_of("parameter")), *inputs())[0]
    wanted = model(*inputs())
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, list(state.values())), torch.autograd.grad(wanted, list(state.values())))


@pytest.mark.parametrize(
    ("model", "capacity_bytes", "reason"),
    [
        (Head(read_twice), 0.0, "read elsewhere"),
        (Head(flat, bias=True), 0.0, "has a bias"),
        (Head(scaled), 0.0, "changed after it"),
        (Head(onto_one), 0.0, "onto one number"),
        (Head(flat), float("inf"), "no budget is given"),
        (Head(flat), 8 * 2 * 15 * CLASSES * 4, "at most 0.00132 MB stay whole"),
    ],
    ids=["read twice", "bias", "scaled", "one number", "no budget", "small"],
)
def test_others_stay_and_say_why(model: nn.Module, capacity_bytes: float, reason: str) -> None:
    decision, program = fused(model, capacity_bytes)
    assert not decision.fused and reason in str(decision)
    assert cross_entropy in [node.target for node in program.graph.nodes]


def test_a_model_within_a_tight_budget_is_exact() -> None:
    torch.manual_seed(0)
    num_symbols = 2047  # tp does not divide it: logits would be whole on both ranks
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=num_symbols,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, num_symbols, (2, 64))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}
    parallel = autopar.compile(model, autopar.virtual_mesh(tp=2), memory_budget=1.7e6, backend="eager", example_inputs=batch)
    program = parallel.compiled.program
    called = [node for node in program.graph.nodes if node.target is projected_cross_entropy]
    assert len(called) == 1
    loss = parallel(**batch).loss
    loss.backward()
    wanted = model(**batch).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    gradients = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
