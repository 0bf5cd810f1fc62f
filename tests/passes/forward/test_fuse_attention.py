"""Attention: flags, operands and what is left of it. Every way to write one: `tests/passes/fuse/test_forms.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.kernels.attention import attention
from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.key_random import KeyRandom
from tests.support.forms import attention_caps_and_sinks, attention_layouts, attention_masks  # noqa: F401  (they register theirs)
from tests.support.forms.attention import ATTENTIONS, attending
from tests.support.forms.attention_documents import MEANING
from tests.support.forms.suite import fused, results, targets, values_of

aten = torch.ops.aten
FORMS = ATTENTIONS.forms


CAUSAL = [name for name in FORMS if name.startswith("causal")]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_is_a_flag_only_where_the_triangle_is_known(name: str) -> None:
    _, _, after = fused(FuseAttention(), FORMS[name].module())
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
    _, _, after = fused(FuseAttention(), FORMS[name].module(), FORMS[name].inputs())
    call = next(node for node in after.graph.nodes if node.target is attention)
    assert (call.kwargs["is_causal"], call.kwargs["window"]) == WINDOWS[name]
    assert (call.args[3] is None) == any(WINDOWS[name])


@pytest.mark.parametrize("name", list(MEANING))
def test_documents_are_operands_only_where_integer_ids_are_compared(name: str) -> None:
    _, decision, after = fused(FuseAttention(), FORMS[name].module(), FORMS[name].inputs())
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
    _, _, after = fused(FuseAttention(), attending(compute, **shapes).module())
    call = next(node for node in after.graph.nodes if node.target is attention)
    assert (call.kwargs["is_causal"], call.kwargs["window"]) == ((True, 2) if rows == 6 else (False, 0))


CAPS = {name: form for name, form in FORMS.items() if "soft cap" in name}
SINKS = {name: form for name, form in FORMS.items() if "sink" in name}


def test_the_cap_is_an_option_of_the_op() -> None:
    for name, form in CAPS.items():
        _, decision, after = fused(FuseAttention(), form.module(), form.inputs())
        call = next(node for node in after.graph.nodes if node.target is attention)
        assert call.kwargs["soft_cap"] > 0.0 and "soft cap" in str(decision), name
        assert not any("tanh" in str(target) for target in targets(after)), name


def test_a_sink_is_a_share_of_the_result() -> None:
    for name, form in SINKS.items():
        _, decision, after = fused(FuseAttention(), form.module(), form.inputs())
        left = [str(target) for target in targets(after)]
        assert "with a sink" in str(decision) and "aten.sigmoid.default" in left, name
        assert "aten.cat.default" not in left and not any("softmax" in target for target in left), name
        assert "not NaN" not in str(decision), name


def test_repeated_heads_are_undone() -> None:
    for name in ("repeated key heads", "repeat_interleave", "repeat, heads in turn", "one key head, by broadcasting"):
        form = FORMS[name]
        _, _, after = fused(FuseAttention(), form.module())
        call = next(node for node in after.graph.nodes if node.target is attention)
        assert call.args[1].meta["val"].shape[1] == form.shapes["key"][1] < call.args[0].meta["val"].shape[1]
        assert aten.expand.default not in targets(after) and aten.repeat.default not in targets(after)


def test_dropout_drops_what_it_would_have() -> None:
    """At the probabilities' place among the draws, and at their positions."""

    def compute(m: Any) -> Tensor:
        return torch.dropout((m.query @ m.key.mT).softmax(-1), 0.25, m.training) @ m.value

    form = attending(compute)
    program, decision, after = fused(FuseAttention(), form.module())
    assert "dropout 0.25" in str(decision)
    pair = [KeyRandom().apply(each) for each in (program, after)]
    found = [results(each, values_of(each, form.module()), True, ["it"])["it"] for each in pair]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    _, decision, after = fused(FuseAttention(), form.module().eval())
    assert len(decision.fused) == 1 and aten.dropout.default not in targets(after)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_result_may_be_written_in_place(through_a_view: bool) -> None:
    """A product keeps its operands for the backward; the op keeps its output, too."""

    def compute(m: Any) -> Tensor:
        out = (m.query @ m.key.mT).softmax(-1) @ m.value
        (out.mT if through_a_view else out).mul_(2.0)
        return out

    form = attending(compute)
    program, decision, after = fused(FuseAttention(), form.module())
    assert len(decision.fused) == 1
    values = values_of(program, form.module())
    found = [results(each, values, True, ["it"])["it"] for each in (program, after)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_router_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).softmax(-1) + (x @ self.weight).softmax(-1)

    decision = fused(FuseAttention(), Router(), (torch.randn(2, 4),))[1]
    assert not decision.found and str(decision) == "nothing to fuse"


def test_several_attentions_of_one_program() -> None:
    def compute(m: Any) -> Tensor:
        once = (m.query @ m.key.mT).softmax(-1) @ m.value
        return (once @ m.key.mT).softmax(-1) @ m.value.sigmoid()

    form = attending(compute)
    program, decision, after = fused(FuseAttention(), form.module())
    assert len(decision.fused) == 2 and targets(after).count(attention) == 2
    values = values_of(program, form.module())
    before, got = results(program, values, True, ["it"]), results(after, values, True, ["it"])
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

    form = attending(compute)
    program, _, after = fused(FuseAttention(), form.module())
    values = values_of(program, form.module())
    found = [results(each, values, True, ["it"])["it"] for each in (program, after)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_chains_of_diamonds_take_no_time() -> None:
    """Of x + f(x), 60 times over, there are 2^60 ways from the softmax to the first x, and so there are for conditions."""

    def summed(m: Any) -> Tensor:
        scores = m.query.sin()
        for _ in range(60):
            scores = scores + 0.5 * scores
        return scores.softmax(-1) @ m.value

    def masked(m: Any) -> Tensor:
        hidden = m.query[0, 0, :, :1] > m.query[0, 0, :, :1].mT
        for _ in range(60):
            hidden = hidden | ~~hidden
        return (m.query @ m.key.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ m.value

    found: list[int] = []
    for compute in (summed, masked):
        shapes = {"query": (1, 2, 8, 8), "key": (1, 2, 8, 8), "value": (1, 2, 8, 8)}
        _, _, after = fused(FuseAttention(), attending(compute, **shapes).module())
        found.append(targets(after).count(attention))
    assert found == [0, 1]
