"""Which kernel runs each attention on a GPU: one of ours, written in Triton, or torch's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.cost.hardware.attention_rates import winner
from autopar.errors import PlanError
from autopar.graph.emit import tensor_of
from autopar.ir.fusion import KernelChoice, KernelDecision, place_of
from autopar.ir.keys import SOURCE, Source
from autopar.ir.program import Program
from autopar.kernels.attention import attention
from autopar.kernels.attention_checks import KERNELS
from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu.attention_aten import why_not
from autopar.plans.json import Json
from autopar.plans.keys import node_keys
from autopar.plans.plan import Plan

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class ChooseKernels:
    """`implementation=` of every `autopar.attention`: "triton" or "aten".

    What torch's kernels do not know (masks, documents, windows, soft caps, dropout by position) ours run. What they know runs by the
    plan, else as `kernels` asks ("triton", "aten"), else the kernel that was measured to be the fastest on `device`
    (`autopar/cost/hardware/attention_rates.py`), and torch's where nothing was. Elsewhere than on a GPU it makes no difference.

    Raises `PlanError` for a kernel of the plan that is neither.

    Reads: a FORWARD program; run it after `KeyRandom`, and before the trace, whose backward is of the same kernel.
    Writes: the option `implementation`. Ensures: every `autopar.attention` has one that can run it.
    """

    kernels: str
    device: str
    planned: Mapping[str, str] = field(default_factory=dict[str, str])
    is_asked: bool = True
    name: str = "choose kernels"

    @staticmethod
    def by(kernels: str, device: str, plan: Plan | None, is_asked: bool = True) -> ChooseKernels:
        return ChooseKernels(kernels, device, {} if plan is None else plan.kernels, is_asked)

    def decide(self, program: Program) -> KernelDecision:
        if not self.is_asked:
            return KernelDecision(())
        wrong = {key: kernel for key, kernel in self.planned.items() if kernel not in KERNELS}
        if wrong:
            key, kernel = next(iter(wrong.items()))
            raise PlanError(f"the plan's kernel of {key!r} is {kernel!r}; attention runs by {' or '.join(map(repr, KERNELS))}")
        keys = node_keys(program)
        unknown = sorted(set(self.planned) - {keys[node] for node in program.graph.nodes if node.target is attention})
        if unknown:
            logger.warning("the plan has kernels for %d attentions that are not here, the first is %r", len(unknown), unknown[0])
        return KernelDecision(tuple(self._choice(node, keys[node]) for node in program.graph.nodes if node.target is attention))

    def apply(self, program: Program, decision: KernelDecision) -> Program:
        if not decision.choices:
            return program
        program, kernels = program.copy(), decision.kernels
        for node, key in node_keys(program).items():
            if key in kernels:
                node.kwargs = {**node.kwargs, "implementation": kernels[key]}
        return program

    def written(self, program: Program, decision: KernelDecision) -> dict[str, Json]:
        return {choice.key: (choice.kernel, choice.reason) for choice in decision.choices}

    def read(self, program: Program, value: Mapping[str, Sequence[str]]) -> KernelDecision:
        """The places in the source are found here."""
        if not self.is_asked:
            return KernelDecision(())
        found: list[KernelChoice] = []
        for node, key in node_keys(program).items():
            if node.target is attention:
                kernel, reason = value[key] if key in value else self._kernel(node, key)
                found.append(KernelChoice(key, kernel, reason, _place(node)))
        return KernelDecision(tuple(found))

    def _choice(self, node: Node, key: str) -> KernelChoice:
        return KernelChoice(key, *self._kernel(node, key), _place(node))

    def _kernel(self, node: Node, key: str) -> tuple[str, str]:
        """The kernel, and the reason."""
        query, key_tensor, value = (tensor_of(each) for each in node.args[:3])
        masks = Masks(*(None if each is None else tensor_of(each) for each in node.args[3:]), **node.kwargs)
        unknown = why_not(query, key_tensor, value, masks) or _sums(node)
        if unknown is not None:
            return "triton", f"torch's kernels do not know {unknown}"
        if key in self.planned:
            return self.planned[key], "by the plan"
        if self.kernels != "auto":
            return "triton" if self.kernels == "triton" else "aten", f'kernels="{self.kernels}"'
        fastest = winner(self.device, query.shape[3], key_tensor.shape[2], masks.is_causal)
        if fastest is None:
            return "aten", f"nothing was measured on {self.device}; ours where torch has none for it"
        return fastest.kernel, str(fastest)


def _place(node: Node) -> str:
    return place_of("attention", SOURCE.get(node) or Source(), node.name)


def _sums(node: Node) -> str | None:
    """Torch's kernels give log Σ exp no gradient."""
    return "gradients of log_sum_exp" if any(user.args[1] == 1 for user in node.users) else None
