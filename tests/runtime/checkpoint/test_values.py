"""Plain values come back as they were; nothing else is taken."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.values import decode, encode


def there_and_back(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "of", kept.__setitem__), allow_nan=False)), kept.__getitem__)


@pytest.mark.parametrize(
    "value", [None, True, 3, -0.0, 1e-300, 0.1, math.inf, "x", [1, [2.5]], (0.9, (1, None)), {0: "a", "0": "b", (1, 2): []}, {}]
)
def test_values_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.float64(-np.inf), np.int64(3), np.bool_(True)], ids=repr)
def test_numbers_of_numpy_come_back_as_those_of_python(value: Any) -> None:
    """A learning rate by `np.cos` is one."""
    found = there_and_back({"lr": (value,)})["lr"][0]
    assert found == value and type(found) in (bool, int, float)


def test_tensors_come_back_under_names_that_tell_them_apart() -> None:
    tensors = [torch.zeros(1), torch.ones(2)]
    found = there_and_back({"exp_avg": tensors[0], "old": [tensors[1]], 0: (tensors[0],)})
    assert found["exp_avg"] is tensors[0] and found["old"][0] is tensors[1] and found[0][0] is tensors[0]
    assert math.isnan(there_and_back(math.nan))


class Number(int):
    pass


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"x", Number(3), torch.float32, lambda: None, np.longdouble(1), np.timedelta64(1, "ns")]
)
def test_other_objects_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=f"'of/a' is a {type(value).__name__}"):
        encode({"a": value}, "of", lambda *_: None)


@pytest.mark.parametrize(
    "value", [{"float": "1"}, {"x": 1}, {"dict": [[1]]}, {"dict": [[[1], 2]]}, {"dict": [["a", 1], ["a", 2]]}, {"tensor": 3}, {}]
)
def test_what_encode_does_not_write_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="the index has"):
        decode(value, str)
