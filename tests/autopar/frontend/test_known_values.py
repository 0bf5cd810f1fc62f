"""What is known without values is computed when it is asked for, writes included, and no more than it is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.frontend.known_values import KnownValues

aten = torch.ops.aten


class Noted:
    """Calls ops, and notes each call; what has values here stands for what has none."""

    def __init__(self) -> None:
        self.known = KnownValues(lambda tensor: tensor.untyped_storage().data_ptr())

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = op(*args, **kwargs)
        self.known.note(op, args, kwargs, result)
        return result


def test_a_value_is_what_it_is_now() -> None:
    call = Noted()
    mask = call(aten.ones.default, [4])
    total = call(aten.sum.default, mask)
    row = call(aten.select.int, mask, 0, 1)
    call(aten.fill_.Scalar, row, 5.0)
    value = call.known.value(mask)
    assert value is not None and value.tolist() == [1, 5, 1, 1]
    value.zero_()
    call(aten.mul_.Scalar, mask, 2.0)
    later, before = call.known.value(mask), call.known.value(total)
    assert later is not None and later.tolist() == [2, 10, 2, 2]
    assert before is not None and float(before) == 4, "it was read before the writes"


def test_what_data_writes_is_known_no_more_nor_are_its_views() -> None:
    call = Noted()
    mask, other = call(aten.ones.default, [4]), call(aten.ones.default, [4])
    view = call(aten.slice.Tensor, mask, 0, 0, 2)
    call(aten.copy_.default, view, torch.rand(2))
    assert call.known.value(mask) is call.known.value(view) is None and call.known.value(other) is not None
    hidden = call(aten.ones.default, [4])
    seen = hidden.view_as(torch.rand(4))  # no call that is known
    call.known.note(aten.copy_.default, (seen, other), {}, seen)
    assert call.known.value(hidden) is None


def test_draws_and_unwritten_memory_are_not_known() -> None:
    call = Noted()
    mask = call(aten.zeros.default, [4])
    call(aten.uniform_.default, mask)
    assert call.known.value(mask) is None
    assert call.known.value(call(aten.rand.default, [4])) is call.known.value(call(aten.empty.memory_format, [4])) is None


def test_no_more_is_computed_than_is_asked_for(monkeypatch: Any) -> None:
    call, computed = Noted(), list[str]()
    positions = call(aten.arange.default, 4)
    large = call(aten.outer.default, positions, positions)
    mask = call(aten.gt.Scalar, positions, 1)
    made_of = call.known._made_of

    def seen(memory: Any) -> Any:
        found = made_of(memory)
        computed.extend(str(each.op) for each in found)
        return found

    monkeypatch.setattr(call.known, "_made_of", seen)
    assert call.known.value(mask) is not None and computed == ["aten.arange.default", "aten.gt.Scalar"]
    value = call.known.value(large)
    assert value is not None and torch.equal(value, large) and computed[2:] == ["aten.outer.default"]
