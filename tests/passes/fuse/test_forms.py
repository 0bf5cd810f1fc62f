"""Every way to write what one op of ours computes becomes that op, with the same outputs and gradients; near misses stay, and say why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from autopar.ir.fusion import FusionSite
from autopar.passes.forward.fuse_attention import FuseAttention
from autopar.passes.forward.fuse_dropout import FuseDropout
from autopar.passes.forward.fuse_gates import FuseGates
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.forward.fuse_rotary import FuseRotary
from autopar.passes.forward.key_random import KeyRandom
from tests.support.forms import (  # noqa: F401  (they register theirs)
    attention_caps_and_sinks,
    attention_documents,
    attention_layouts,
    attention_masks,
    attention_near_misses,
    gate_near_misses,
    norm_near_misses,
)
from tests.support.forms.attention import ATTENTIONS
from tests.support.forms.dropout import DROPOUTS
from tests.support.forms.gate import GATES
from tests.support.forms.norm import NORMS
from tests.support.forms.rotary import ROTATIONS
from tests.support.forms.suite import Captured, Catalogue, Form, Ran, Rewriting, captured_suite, ran_suite, targets


@dataclass(frozen=True)
class Kind:
    """The forms that `rewriting` finds, at least `least` of them and as many near misses, and how exact it is.

    They are captured in `dtype` and run in float64. `before`: the passes on which it builds.
    """

    rewriting: Rewriting
    catalogue: Catalogue
    least: tuple[int, int]
    before: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-9
    modes: tuple[str, ...] = ("training", "inference")


KINDS = {
    "attention": Kind(FuseAttention(), ATTENTIONS, (40, 25), dtype=torch.float64),
    "norm": Kind(FuseNorms(), NORMS, (35, 25), dtype=torch.float64),
    "gate": Kind(FuseGates(), GATES, (40, 16)),
    "rotary": Kind(FuseRotary(), ROTATIONS, (20, 10)),
    # The masks are the same, bit for bit; without training there are none.
    "dropout": Kind(FuseDropout(), DROPOUTS, (20, 12), before=(KeyRandom(),), tolerance=0.0, modes=("training",)),
}


# Every form trains in the quick suite; every so many-th is also run without training, and in sixteen bits.
OFTEN = 4


def forms() -> Iterator[tuple[str, str]]:
    return ((kind, name) for kind, each in KINDS.items() for name in each.catalogue.forms)


def is_often(kind: str, name: str) -> bool:
    return list(KINDS[kind].catalogue.forms).index(name) % OFTEN == 0


def some_slow(cases: Iterable[tuple[str, ...]], is_quick: Callable[[tuple[str, ...]], bool]) -> list[Any]:
    return [pytest.param(*each, marks=() if is_quick(each) else pytest.mark.slow) for each in cases]


@cache
def ran(kind: str, training: bool, dtype: torch.dtype, often: bool) -> Ran:
    """Of the forms that are run often, or of the others: slow ones are not captured where they are left out."""
    each, is_plain = KINDS[kind], training and dtype == KINDS[kind].dtype
    chosen = [form for name, form in each.catalogue.forms.items() if is_plain or is_often(kind, name) == often]
    return ran_suite(each.rewriting, chosen, training, dtype, *each.before)


def ran_with(kind: str, name: str, training: bool, dtype: torch.dtype) -> Ran:
    """`ran`, of all forms where these train in their own dtype."""
    return ran(kind, training, dtype, (training and dtype == KINDS[kind].dtype) or is_often(kind, name))


@cache
def near_misses(kind: str) -> Captured:
    each = KINDS[kind]
    return captured_suite(each.rewriting, list(each.catalogue.near_misses.values()), *each.before)


def check_found(found: list[FusionSite], form: Form) -> None:
    assert [each.fused for each in found] == [True] * len(form.says), found
    for each, pattern in zip(found, form.says, strict=True):
        assert f" at {form.file}:" in str(each) and re.search(pattern, str(each)), (pattern, str(each))


@pytest.mark.parametrize(
    ("kind", "name", "mode"),
    some_slow(
        ((kind, name, mode) for kind, name in forms() for mode in KINDS[kind].modes),
        lambda each: each[2] == "training" or is_often(*each[:2]),
    ),
)
def test_every_form_is_one_op_and_computes_the_same(kind: str, name: str, mode: str) -> None:
    run, tolerance = ran_with(kind, name, mode == "training", KINDS[kind].dtype), KINDS[kind].tolerance
    check_found(run.found[name], KINDS[kind].catalogue.forms[name])
    assert (run.exact[name][0] != 0).any()
    for one, other in zip(run.exact_after[name], run.exact[name], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "name"), some_slow(forms(), lambda each: is_often(*each)))
def test_every_form_keeps_its_accuracy_in_sixteen_bits(kind: str, name: str) -> None:
    """FlashAttention's rule: at most twice the error of the form itself in bfloat16. What it computes in float32 stays as near as that."""
    run = ran_with(kind, name, True, torch.bfloat16)
    check_found(run.found[name], KINDS[kind].catalogue.forms[name])
    for position, true in enumerate(run.exact[name]):
        got, own = run.own_after[name][position], run.own[name][position]
        assert got.dtype == own.dtype
        # Gradients of attention are sums of products of rounded values.
        times, rounding = (3 if position else 2, 2e-3) if kind == "attention" else (2, 4e-3)
        rounding = rounding if got.dtype == torch.bfloat16 else 1e-5
        error, allowed = ((each.double() - true).abs().max().item() for each in (got, own))
        assert error <= times * allowed + rounding * true.abs().max().item()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, each in KINDS.items() for name in each.catalogue.near_misses])
def test_near_misses_stay_and_say_why(kind: str, name: str) -> None:
    found, form = near_misses(kind).found[name], KINDS[kind].catalogue.near_misses[name]
    assert found and not any(each.fused for each in found), found
    texts = [str(each) for each in found]
    assert any(re.search(form.says[0], text) for text in texts), texts
    assert all(f" at {form.file}:" in text and " not fused: " in text for text in texts)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_program_of_near_misses_is_left_as_it_is(kind: str) -> None:
    suite = near_misses(kind)
    assert not suite.decision.fused and targets(suite.after) == targets(suite.program)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_suite_is_large_enough(kind: str) -> None:
    each = KINDS[kind]
    assert len(each.catalogue.forms) >= each.least[0] and len(each.catalogue.near_misses) >= each.least[1]
