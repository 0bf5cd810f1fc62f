"""Which kernel runs attention: by the plan, by what is asked for, by what was measured; ours where torch's do not know what it does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.attention import attention
from autopar.passes.forward.choose_kernels import ChooseKernels
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.forward.unify_attention import UnifyAttention
from autopar.plans.plan import Plan


class Attends(nn.Module):
    """Attention of heads of 128, causal but where told otherwise."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 128, length: int = 16, **options: Any) -> None:
        super().__init__()
        shape = (1, 2, length, size)
        self.query, self.key, self.value = (nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(3))
        self.options = {"is_causal": True} | options

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, **self.options) * x


def unified(model: nn.Module) -> Program:
    program = capture(model.train(), (torch.ones(()),), {}, virtual_mesh(dp=1), outputs="all")
    return KeyRandom().apply(UnifyAttention().apply(program))


def chosen(model: nn.Module, kernels: str = "auto", device: str = "a100") -> tuple[str, str]:
    """The kernel of the only attention, which the program then has, and what is said of it."""
    program, choose = unified(model), ChooseKernels(kernels, device)
    decision = choose.decide(program)
    after = choose.apply(program, decision)
    (node,) = [node for node in after.graph.nodes if node.target is attention]
    (choice,) = decision.choices
    assert node.kwargs["implementation"] == choice.kernel == decision.kernels[choice.key]
    return choice.kernel, str(decision)


@pytest.mark.parametrize(
    ("kernels", "device", "kernel", "reason"),
    [
        ("auto", "a100", "aten", "FlashAttention-2 99 TFLOP/s, FlashAttention Triton 50"),
        ("auto", "mi300x", "aten", "nothing was measured on mi300x"),
        ("triton", "a100", "triton", 'kernels="triton"'),
        ("aten", "a100", "aten", 'kernels="aten"'),
        ("off", "a100", "aten", 'kernels="off"'),
    ],
)
def test_what_is_asked_for_and_what_was_measured(kernels: str, device: str, kernel: str, reason: str) -> None:
    found, text = chosen(Attends(), kernels, device)
    assert found == kernel and reason in text and "attention at test_choose_kernels.py:" in text


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (Attends(is_causal=False, attn_mask=torch.randn(16, 16).bfloat16()), "a mask"),
        (Attends(dropout_p=0.5), "a dropout by position"),
        (Attends(torch.float32), "torch.float32"),
        (Attends(size=20), "heads of 20"),
    ],
    ids=["mask", "dropout", "float32", "odd heads"],
)
def test_ours_run_what_torchs_do_not_know(model: nn.Module, unknown: str) -> None:
    for kernels in ("auto", "aten"):
        assert chosen(model, kernels) == ("triton", chosen(model)[1]) and f"torch's kernels do not know {unknown}" in chosen(model)[1]


def test_ranks_that_read_the_decision_leave_attention_alone_where_nothing_is_asked() -> None:
    """Rank 0 says nothing then, and would go on with another program than they."""
    program, choose = unified(Attends()), ChooseKernels("auto", "a100", is_asked=False)
    first = choose.decide(program)
    read = choose.read(program, choose.written(program, first))  # type: ignore[arg-type]
    assert read == first and choose.apply(program, read) is program


def test_a_plan_decides_and_an_unknown_kernel_is_refused() -> None:
    program = unified(Attends())
    (key,) = ChooseKernels("auto", "a100").decide(program).kernels
    assert ChooseKernels("auto", "a100", {key: "triton"}).decide(program).kernels == {key: "triton"}
    with pytest.raises(PlanError, match="'flash'; attention runs by 'triton' or 'aten'"):
        ChooseKernels("auto", "a100", {key: "flash"}).decide(program)


def test_the_choice_is_in_the_plan_and_explained_and_may_be_edited() -> None:
    class Loss(Attends):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[0, 0, 0, 0]).float().square().mean() + x.mean()

    model, mesh, x = Loss(), virtual_mesh(dp=2), torch.ones(4, 1, 1, 1)
    parallel = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", cluster="8xH100")
    (key, kernel), *others = parallel.plan.kernels.items()
    assert kernel == "aten" and not others
    assert "whose kernel runs attention" in parallel.explain(detail="all") and "by aten: cuDNN " in parallel.explain(detail="all")
    assert parallel.print_program().count("implementation='aten'") >= 2, "the backward is of the same kernel"
    edited = dataclasses.replace(Plan.from_json(parallel.plan.to_json()), kernels={key: "triton"})
    again = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", cluster="8xH100", plan=edited)
    assert again.plan.kernels == {key: "triton"} and again.plan.strategies == parallel.plan.strategies
    assert "by triton: by the plan" in again.explain(detail="all")
    on_cpus = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", cluster="cpu")
    assert not on_cpus.plan.kernels and "whose kernel" not in on_cpus.explain(detail="all")
