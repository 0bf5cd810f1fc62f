"""What an optimizer that goes element by element sees: this rank's parts of DTensors as plain tensors, with their state.

DTensor dispatches each op in Python, and torch's optimizers do not group DTensors into their `foreach` kernels by themselves.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime._torch import local_part
from autopar.runtime.module.placement import like

# The state of an optimizer: by parameter its entries.
State = MutableMapping[Any, dict[str, Any]]


class _StandIn(NamedTuple):
    """This rank's part of a parameter as a plain tensor, its state, what the optimizer holds for the parameter itself, and the entries
    that these two had."""

    local: torch.Tensor
    state: dict[str, Any]
    outer: dict[str, Any]
    parts: tuple[Any, ...]
    entries: tuple[Any, ...]

    def is_of(self, outer: dict[str, Any], part: torch.Tensor) -> bool:
        """Whether it holds the same objects: an entry that somebody has replaced is another."""
        return self.outer is outer and _are_same(outer, self.entries) and self.local.data_ptr() == part.data_ptr()


class Entered:
    """Parameters that enter a step together. They do so again as they are where all is as it was: a look at everything at once takes a
    fraction of what a look at each takes."""

    def __init__(self, parameters: Sequence[nn.Parameter], known: Sequence[_StandIn], outer: State, inner: State) -> None:
        self.parameters, self.inner = list(parameters), inner
        self.locals = [each.local for each in known]
        self._addresses = list(map(torch.Tensor.data_ptr, self.locals))
        # An optimizer without state has none of a parameter, not an empty one.
        self._outer, self._states = list(map(outer.get, parameters)), [each.state for each in known if each.state]
        self._entries, self._parts = _all_entries(self._outer), _all_entries(self._states)

    def is_of(self, parameters: Sequence[nn.Parameter], outer: State) -> bool:
        """Whether these are they, with the state, and in the memory, that they had."""
        return (
            _are_all(parameters, self.parameters)
            and _are_all(list(map(outer.get, parameters)), self._outer)
            and _are_all(_all_entries(self._outer), self._entries)
            and [local_part(each).data_ptr() for each in parameters if isinstance(each, DTensor)] == self._addresses
        )

    def is_left(self) -> bool:
        """Whether their state, as the step leaves it, is made of the same objects as before."""
        return _are_all(list(self.inner.values()), self._states) and _are_all(_all_entries(self._states), self._parts)

    def put(self, gradients: Sequence[DTensor]) -> None:
        for local, gradient in zip(self.locals, gradients, strict=True):
            local.grad = local_part(gradient)


class StandIns:
    """By parameter what stands in for it. State is handed on as DTensors, under the parameters themselves in `outer`, and what takes the
    place of an entry there is used from then on."""

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, _StandIn] = {}
        self._entered: list[nn.Parameter] = []
        self._together: Entered | None = None

    def again(self, parameters: Sequence[nn.Parameter], gradients: Sequence[DTensor], outer: State) -> Entered | None:
        """What stands in for `parameters`, with their gradients; None where others entered the last step, or these have other state now."""
        if self._together is None or not self._together.is_of(parameters, outer):
            return None
        self._together.put(gradients)
        return self._together

    def enter_together(self, parameters: Sequence[nn.Parameter], outer: State) -> Entered:
        """As `enter`, of all that a step has; `leave_together` is its end."""
        inner = defaultdict[Any, dict[str, Any]](dict)
        for each in parameters:
            self.enter(each, outer, inner)
        self._entered.clear()
        self._together = Entered(parameters, [self._known[each] for each in parameters], outer, inner)
        return self._together

    def leave_together(self, outer: State) -> None:
        together = self._together
        assert together is not None, "nothing has entered"
        if together.is_left():
            for local in together.locals:
                local.grad = None
            return
        self._entered[:] = together.parameters
        self._together = None
        self.leave(outer, together.inner)

    def knows(self, parameter: nn.Parameter, outer: Mapping[Any, dict[str, Any]]) -> bool:
        """Whether the state of `parameter` is what this handed on."""
        known, entries = self._known.get(parameter), outer.get(parameter)
        return known is not None and entries is not None and known.outer is entries and _are_same(entries, known.entries)

    def enter(self, parameter: nn.Parameter, outer: State, inner: State) -> torch.Tensor:
        """What stands in for `parameter`, a DTensor with a gradient; its state goes from `outer` to `inner`. Raises `AutoparError` for
        state that cannot be this rank's part."""
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        known, entries, part = self._known.get(parameter), outer.get(parameter, {}), local_part(parameter)
        if known is None or not known.is_of(entries, part):
            state = parts_of_state(entries)
            check_parts(state, part)
            known = _StandIn(part.detach(), state, entries, tuple(state.values()), tuple(entries.values()))
            self._known[parameter] = known
        known.local.grad = local_part(parameter.grad)
        if known.state:
            inner[known.local] = known.state
        self._entered.append(parameter)
        return known.local

    def leave(self, outer: State, inner: State) -> None:
        """Hand the state of all that have entered back from `inner` to `outer`."""
        for parameter in self._entered:
            self._leave(parameter, outer, inner)
        self._entered.clear()

    def _leave(self, parameter: nn.Parameter, outer: State, inner: State) -> None:
        known = self._known[parameter]
        known.local.grad = None
        state = inner.pop(known.local, None)
        if state is None or (state is known.state and _are_same(state, known.parts)):
            return
        assert isinstance(parameter, DTensor)
        entries = outer[parameter]
        for key, value in state.items():
            is_part = key != "step" and isinstance(value, torch.Tensor) and value.shape == known.local.shape
            held = entries.get(key)
            if not is_part:
                entries[key] = value
            elif not isinstance(held, DTensor) or local_part(held) is not value:
                entries[key] = like(parameter, value)
        self._known[parameter] = _StandIn(known.local, state, entries, tuple(state.values()), tuple(entries.values()))


def _all_entries(states: Iterable[Mapping[str, Any] | None]) -> list[Any]:
    return list(chain.from_iterable(each.values() for each in states if each))


def _are_all(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _are_same(entries: Mapping[str, Any], known: tuple[Any, ...]) -> bool:
    return _are_all(list(entries.values()), known)


def parts_of_state(outer: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer holds of a parameter, of DTensors this rank's parts."""
    return {key: local_part(value) if isinstance(value, DTensor) else value for key, value in outer.items()}


def check_parts(state: Mapping[str, Any], local: torch.Tensor) -> None:
    """Raise `AutoparError` for state that cannot be this rank's part."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape != local.shape:
            raise AutoparError(
                f"the optimizer's state has {key!r} of shape {list(value.shape)} for a parameter of which this rank holds "
                f"{list(local.shape)}: put a DTensor there that lies as the parameter does; autopar.save and autopar.load cut whole state "
                "for any mesh"
            )
