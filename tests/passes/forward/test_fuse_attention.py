"""Ways to write attention become one op, with the same outputs and gradients; near misses stay, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.frontend.capture import capture
from autopar.graph.promote import default_float64, promote
from autopar.ir.fusion import FusionDecision, FusionSite
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.attention import attention
from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.key_random import KeyRandom
from autopar.runtime.execute.random_key import random_key
from tests.support.forms import attention_caps_and_sinks, attention_layouts, attention_masks, attention_near_misses  # noqa: F401  (they register theirs)
from tests.support.forms.attention import FORMS, NEAR_MISSES, AttentionForm
from tests.support.forms.attention_documents import MEANING

MESH = virtual_mesh(dp=1)
aten = torch.ops.aten


class Suite(nn.Module):
    """Many forms in one model, captured at once; `suite_i` is the i-th."""

    def __init__(self, forms: list[AttentionForm]) -> None:
        super().__init__()
        for position, form in enumerate(forms):
            self.add_module(f"suite_{position}", form.module())
        self.num_forms = len(forms)

    def forward(self, *inputs: tuple[Tensor, ...]) -> list[Any]:
        return [getattr(self, f"suite_{position}")(*inputs[position]) for position in range(self.num_forms)]


def fused(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Program, FusionDecision, Program]:
    program = capture(module, inputs, {}, MESH, outputs="all")
    decision = FuseAttention().decide(program)
    return program, decision, FuseAttention().apply(program, decision)


@dataclass(frozen=True)
class Ran:
    """What was found of every form, by name, and what the suite computes before and after: exactly, and in its own dtype."""

    found: dict[str, list[FusionSite]]
    exact: dict[str, list[Tensor]]
    exact_after: dict[str, list[Tensor]]
    own: dict[str, list[Tensor]]
    own_after: dict[str, list[Tensor]]


@cache
def ran(training: bool, dtype: torch.dtype) -> Ran:
    forms = list(FORMS.values())
    suite = Suite(forms).to(dtype).train(training).requires_grad_(training)
    batch = tuple(tuple(as_float(value, dtype) for value in form.inputs()) for form in forms)
    program, decision, after = fused(suite, batch)
    values = values_of(program, suite, batch)
    wide = [as_float(value, torch.float64) for value in values]
    with default_float64():
        exact, exact_after = (results(promote(each), wide, training) for each in (program, after))
    own, own_after = (results(each, values, training) for each in (program, after))
    return Ran(by_form(decision, forms), exact, exact_after, own, own_after)


def by_form(decision: FusionDecision, forms: list[AttentionForm]) -> dict[str, list[FusionSite]]:
    found: dict[str, list[FusionSite]] = {form.name: [] for form in forms}
    for each in decision.found:
        found[forms[int(each.source.module.removeprefix("suite_"))].name].append(each)
    return found


def as_float(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def values_of(program: Program, module: nn.Module, inputs: Any) -> list[Tensor]:
    """What the placeholders take."""
    state, batch = dict(module.named_parameters()) | dict(module.named_buffers()), pytree.tree_leaves(inputs)
    found: list[Tensor] = []
    for item in program.signature.inputs:
        if item.kind == "batch":
            found.append(batch[int(item.name)])
        else:
            found.append(program.constants[item.name] if item.kind == "constant" else state[item.name].detach())
    return found


def results(program: Program, values: list[Tensor], training: bool) -> dict[str, list[Tensor]]:
    """By form: its output, and in training the gradients of its parameters, of a weighted sum of all outputs."""
    inputs = program.signature.inputs
    values = [value.clone().requires_grad_(item.requires_grad) for value, item in zip(values, inputs, strict=True)]
    outputs = list(program.module()(*values))
    found = {f"suite_{position}": [output.detach()] for position, output in enumerate(outputs)}
    if training:
        draw = torch.Generator().manual_seed(3)
        total = sum((out.double() * torch.randn(out.shape, generator=draw, dtype=torch.float64)).sum() for out in outputs)
        trained = [(item.name, value) for item, value in zip(inputs, values, strict=True) if item.requires_grad]
        gradients = torch.autograd.grad(total, [value for _, value in trained])  # type: ignore[arg-type]
        for (name, _), gradient in zip(trained, gradients, strict=True):
            found.setdefault(name.split(".")[0], []).append(gradient)
    return found


def place_of(name: str) -> str:
    return f"suite_{list(FORMS).index(name)}"


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_is_one_op(name: str, training: bool) -> None:
    run, place = ran(training, torch.float64), place_of(name)
    assert [each.fused for each in run.found[name]] == [True], run.found[name]
    assert len(run.exact[place]) == len(run.exact_after[place])
    for one, other in zip(run.exact_after[place], run.exact[place], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_keeps_its_accuracy_in_sixteen_bits(name: str) -> None:
    """FlashAttention's rule: at most twice the error of the form itself in bfloat16, gradients three times."""
    run, place = ran(True, torch.bfloat16), place_of(name)
    assert [each.fused for each in run.found[name]] == [True], run.found[name]
    for position, true in enumerate(run.exact[place]):
        got, own = run.own_after[place][position], run.own[place][position]
        assert got.dtype == own.dtype
        error, allowed = ((each.double() - true).abs().max().item() for each in (got, own))
        assert error <= (3 if position else 2) * allowed + 2e-3 * true.abs().max().item()


@cache
def near_misses() -> tuple[dict[str, list[FusionSite]], FusionDecision, bool]:
    forms = list(NEAR_MISSES.values())
    program, decision, after = fused(Suite(forms), tuple(form.inputs() for form in forms))
    return by_form(decision, forms), decision, targets(after) == targets(program)


@pytest.mark.parametrize("name", list(NEAR_MISSES))
def test_near_misses_stay_and_say_why(name: str) -> None:
    found = near_misses()[0][name]
    assert found and not any(each.fused for each in found), found
    texts = [str(each) for each in found]
    assert any(NEAR_MISSES[name].reason in text for text in texts), texts
    assert all(text.startswith("attention at attention_") and " not fused: " in text for text in texts)


def test_a_program_of_near_misses_is_left_as_it_is() -> None:
    _, decision, same = near_misses()
    assert same and not decision.fused


def test_the_suite_is_large_enough() -> None:
    assert len(FORMS) >= 40 and len(NEAR_MISSES) >= 25


CAUSAL = [name for name in FORMS if name.startswith("causal")]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_is_a_flag_only_where_the_triangle_is_known(name: str) -> None:
    _, _, after = fused(FORMS[name].module(), ())
    call = next(node for node in after.graph.nodes if node.target is attention)
    known = name not in ("causal by a buffer", "causal, keys longer than queries")
    assert call.kwargs["is_causal"] == known
    assert (call.args[3] is None) == known


WINDOWS = {
    "window": (True, 3),
    "window on both sides": (False, 3),
    "window, added": (True, 2),
    "causal, then half of a band": (True, 4),
    "half of a band, then causal": (True, 3),
    "half of a band": (False, 0),
    "a band that is not where the rows are": (False, 0),
    "window of a buffer": (False, 0),
    "window that some heads have": (False, 0),
    "window, rows without any key": (True, 2),
}


@pytest.mark.parametrize("name", list(WINDOWS))
def test_window_is_a_flag_only_where_the_band_is_known(name: str) -> None:
    _, _, after = fused(FORMS[name].module(), FORMS[name].inputs())
    call = next(node for node in after.graph.nodes if node.target is attention)
    assert (call.kwargs["is_causal"], call.kwargs["window"]) == WINDOWS[name]
    assert (call.args[3] is None) == any(WINDOWS[name])


@pytest.mark.parametrize("name", list(MEANING))
def test_documents_are_operands_only_where_integer_ids_are_compared(name: str) -> None:
    _, decision, after = fused(FORMS[name].module(), FORMS[name].inputs())
    call = next(node for node in after.graph.nodes if node.target is attention)
    mask, of_query, of_key = call.args[3:6]
    assert (of_query is not None, call.kwargs["is_causal"], call.kwargs["window"], mask is not None) == MEANING[name]
    assert ("documents; " in str(decision)) == (of_query is not None) == (of_key is not None)


@pytest.mark.parametrize("rows", [6, 9])
def test_a_window_of_added_numbers_is_no_flag_where_it_empties_a_row(rows: int) -> None:
    """Such a row gets a softmax of its scores."""

    def compute(m: Any) -> Tensor:
        inside = torch.ones(rows, 5, dtype=torch.bool).tril().triu(-1)
        return (m.query @ m.key.mT + torch.where(inside, 0.0, -2e9).to(m.query.dtype)).softmax(-1) @ m.value

    shapes = {"query": (1, 2, rows, 8), "key": (1, 2, 5, 8), "value": (1, 2, 5, 8)}
    _, _, after = fused(AttentionForm("band", compute, shapes).module(), ())
    call = next(node for node in after.graph.nodes if node.target is attention)
    assert (call.kwargs["is_causal"], call.kwargs["window"]) == ((True, 2) if rows == 6 else (False, 0))


CAPS = {name: form for name, form in FORMS.items() if "soft cap" in name}
SINKS = {name: form for name, form in FORMS.items() if "sink" in name}


def test_the_cap_is_an_option_of_the_op() -> None:
    for name, form in CAPS.items():
        _, decision, after = fused(form.module(), form.inputs())
        call = next(node for node in after.graph.nodes if node.target is attention)
        assert call.kwargs["soft_cap"] > 0.0 and "soft cap" in str(decision), name
        assert not any("tanh" in str(target) for target in targets(after)), name


def test_a_sink_is_a_share_of_the_result() -> None:
    for name, form in SINKS.items():
        _, decision, after = fused(form.module(), form.inputs())
        left = [str(target) for target in targets(after)]
        assert "with a sink" in str(decision) and "aten.sigmoid.default" in left, name
        assert "aten.cat.default" not in left and not any("softmax" in target for target in left), name
        assert "not NaN" not in str(decision), name


def test_repeated_heads_are_undone() -> None:
    for name in ("repeated key heads", "repeat_interleave", "repeat, heads in turn", "one key head, by broadcasting"):
        form = FORMS[name]
        _, _, after = fused(form.module(), ())
        call = next(node for node in after.graph.nodes if node.target is attention)
        assert call.args[1].meta["val"].shape[1] == form.shapes["key"][1] < call.args[0].meta["val"].shape[1]
        assert aten.expand.default not in targets(after) and aten.repeat.default not in targets(after)


def test_dropout_drops_what_it_would_have() -> None:
    """At the probabilities' place among the draws, and at their positions."""

    def compute(m: Any) -> Tensor:
        return torch.dropout((m.query @ m.key.mT).softmax(-1), 0.25, m.training) @ m.value

    form = AttentionForm("dropout", compute, FORMS["divided"].shapes)
    program, decision, after = fused(form.module(), ())
    assert "dropout 0.25" in str(decision)
    values = [*values_of(program, form.module(), ()), torch.tensor(random_key(0, 0))]
    found = [
        [tensor for tensors in results(KeyRandom().apply(each), values, True).values() for tensor in tensors] for each in (program, after)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    _, decision, after = fused(form.module().eval(), ())
    assert len(decision.fused) == 1 and aten.dropout.default not in targets(after)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_result_may_be_written_in_place(through_a_view: bool) -> None:
    """A product keeps its operands for the backward; the op keeps its output, too."""

    def compute(m: Any) -> Tensor:
        out = (m.query @ m.key.mT).softmax(-1) @ m.value
        (out.mT if through_a_view else out).mul_(2.0)
        return out

    form = AttentionForm("written", compute, FORMS["divided"].shapes)
    program, decision, after = fused(form.module(), ())
    assert len(decision.fused) == 1
    values = values_of(program, form.module(), ())
    found = [results(each, values, True)["suite_0"] for each in (program, after)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_router_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).softmax(-1) + (x @ self.weight).softmax(-1)

    decision = fused(Router(), (torch.randn(2, 4),))[1]
    assert not decision.found and str(decision) == "nothing to fuse"


def test_several_attentions_of_one_program() -> None:
    def compute(m: Any) -> Tensor:
        once = (m.query @ m.key.mT).softmax(-1) @ m.value
        return (once @ m.key.mT).softmax(-1) @ m.value.sigmoid()

    form = AttentionForm("two", compute, FORMS["divided"].shapes)
    program, decision, after = fused(form.module(), ())
    assert len(decision.fused) == 2 and targets(after).count(attention) == 2
    values = values_of(program, form.module(), ())
    before, got = results(program, values, True), results(after, values, True)
    for name, wanted in before.items():
        for one, other in zip(got[name], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_mask_that_out_has_written_is_read_as_it_is() -> None:
    """`out=` writes into what it names, not into its first operand: the triangle seen through a view is a diagonal by then."""

    def compute(m: Any) -> Tensor:
        scores = m.query @ m.key.mT
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        seen = mask[None, None]
        torch.eq(torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1]), out=mask)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ m.value

    form = AttentionForm("out", compute, FORMS["divided"].shapes)
    program, _, after = fused(form.module(), ())
    values = values_of(program, form.module(), ())
    found = [results(each, values, True)["suite_0"] for each in (program, after)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
