from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError
from autopar.ir.precision import MixedPrecision


def test_the_short_name_and_the_defaults() -> None:
    assert MixedPrecision.of("bf16") == MixedPrecision(torch.bfloat16, torch.float32, torch.float32, ())
    assert MixedPrecision.of(None) is None
    assert MixedPrecision(grad=torch.bfloat16).reduce == torch.bfloat16
    asked = MixedPrecision(param=torch.float16)
    assert MixedPrecision.of(asked) is asked and autopar.MixedPrecision is MixedPrecision


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("half", r'precision=\'half\' is unknown; use "bf16"'),
    ],
)
def test_other_names_are_refused(asked: str, message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        MixedPrecision.of(asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param": torch.float64}, r"MixedPrecision\(param=torch.float64\) is none"),
        ({"reduce": torch.int8}, r"MixedPrecision\(reduce=torch.int8\) is none"),
        ({"grad": torch.float16}, r"param=torch.bfloat16, grad=torch.float16\) cannot be: gradients come in param"),
    ],
)
def test_dtypes_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AutoparError, match=message):
        MixedPrecision(**options)


def test_what_is_kept_is_a_module_and_all_within() -> None:
    precision = MixedPrecision(keep=["*.router", "head"])  # type: ignore[arg-type]
    assert precision.keep == ("*.router", "head") and MixedPrecision(keep="head").keep == ("head",)  # type: ignore[arg-type]
    kept = {
        path: precision.keeps(path) for path in ("", "head", "head.proj", "layers.0.router", "layers.0.router.gate", "layers.0", "ahead")
    }
    assert [path for path, is_kept in kept.items() if is_kept] == ["head", "head.proj", "layers.0.router", "layers.0.router.gate"]


def test_it_prints_and_goes_to_json_and_back() -> None:
    precision = MixedPrecision(torch.float16, torch.bfloat16, keep=("head",))
    assert str(precision) == "computes in float16, gradients summed in float32, over ranks in bfloat16, masters float32, float32 in head"
    held = MixedPrecision(grad=torch.bfloat16)
    assert str(held) == "computes in bfloat16, gradients summed in bfloat16, held so until the update, masters float32"
    assert MixedPrecision.of_content(precision.content()) == precision
    assert MixedPrecision.of_content(None) is None
