"""What an optimizer that goes element by element sees: this rank's parts of DTensors as plain tensors, with their state.

DTensor dispatches each op in Python, and torch's optimizers do not group DTensors into their `foreach` kernels by themselves.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.driver.optimizers import scope_of
from autopar.errors import AutoparError
from autopar.runtime._torch import local_part
from autopar.runtime.module.placement import like
from autopar.runtime.train.runs import Member, Run, State, is_large, is_part, runs_of


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
    """Parameters that enter a step together, of `groups` of options. They do so again as they are where all is as it was: a look at
    everything at once takes a fraction of what a look at each takes. Of the groups that `join` those that lie side by side are stepped in
    pieces, and put to what is `laid` out; a large one that is not in pieces is one."""

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        known: Mapping[nn.Parameter, _StandIn],
        outer: State,
        inner: State,
        joins: Collection[int],
        laid: set[nn.Parameter],
    ) -> None:
        self.parameters, self.inner = list(chain.from_iterable(groups)), inner
        self._locals = [known[each].local for each in self.parameters]
        self._sizes = list(map(len, groups))
        of_group = [number for number, group in enumerate(groups) for _ in group]
        self._runs = [Run(each, inner) for each in runs_of(self._members(of_group, known, joins, laid))]
        joined = {member.number for run in self._runs for member in run.members}
        self._alone = [number for number in range(len(self.parameters)) if number not in joined]
        laid |= {self.parameters[number] for number in joined}
        self.alone: list[list[torch.Tensor]] = [[] for _ in groups]
        self.pieces = [(run.members[0].group, piece) for run in self._runs for piece in run.pieces]
        for number in self._alone:
            group, local = of_group[number], self._locals[number]
            if group in joins and is_large(local):
                self.pieces.append((group, local))  # it has no state yet, or cannot be cut
            else:
                self.alone[group].append(local)
        self._addresses = list(map(torch.Tensor.data_ptr, self._locals))
        # An optimizer without state has none of a parameter, not an empty one.
        self._outer, self._states = list(map(outer.get, self.parameters)), list(inner.values())
        self._entries, self._parts = _all_entries(self._outer), _all_entries(self._states)

    def _members(
        self, of_group: Sequence[int], known: Mapping[nn.Parameter, _StandIn], joins: Collection[int], laid: set[nn.Parameter]
    ) -> Iterator[Member]:
        if len(set(self.parameters)) != len(self.parameters):
            return  # torch warns of one that is in a group twice, and steps it twice
        for number, (each, group) in enumerate(zip(self.parameters, of_group, strict=True)):
            if group in joins:
                assert isinstance(each, DTensor)
                yield Member(number, self._locals[number], local_part(each), group, known[each].state, each in laid)

    def is_of(self, groups: Sequence[Sequence[nn.Parameter]], outer: State) -> bool:
        """Whether these are they, in the groups, with the state, and in the memory, that they had."""
        parameters = list(chain.from_iterable(groups))
        return (
            _are_all(parameters, self.parameters)
            and list(map(len, groups)) == self._sizes
            and _are_all(list(map(outer.get, parameters)), self._outer)
            and _are_all(_all_entries(self._outer), self._entries)
            and [local_part(each).data_ptr() for each in parameters if isinstance(each, DTensor)] == self._addresses
            and all(run.is_as_it_was() for run in self._runs)
        )

    def is_left(self) -> bool:
        """Whether their state, as the step leaves it, is made of the same objects as before."""
        return _are_all(list(self.inner.values()), self._states) and _are_all(_all_entries(self._states), self._parts)

    def put(self, gradients: Sequence[DTensor]) -> bool:
        """Whether they lie as these parameters want them, which have them then."""
        parts = list(map(local_part, gradients))
        if not all(run.put([parts[member.number] for member in run.members]) for run in self._runs):
            return False
        for number in self._alone:
            self._locals[number].grad = parts[number]
        return True

    def rounds(self, options: Sequence[Mapping[str, Any]]) -> list[list[list[torch.Tensor]]]:
        """What is stepped at once, by group, of which there are `options`. With `foreach` an op goes over all tensors before the next, and
        pieces are stepped one by one so that each stays in the processor's cache; others go tensor by tensor themselves."""
        first, found = [list(each) for each in self.alone], list[list[list[torch.Tensor]]]()
        for group, piece in self.pieces:
            if options[group].get("foreach"):
                found.append([[piece] if number == group else [] for number in range(len(first))])
            else:
                first[group].append(piece)
        return [first, *found] if any(first) else found

    def end_step(self) -> None:
        """Where it `is_left`."""
        for run in self._runs:
            run.end_step()
        for number in self._alone:
            self._locals[number].grad = None

    def dissolve(self) -> None:
        """State is that of the parameters each by itself, and this is not entered again."""
        for run in self._runs:
            run.dissolve(self.inner)


class StandIns:
    """By parameter what stands in for it. State is handed on as DTensors, under the parameters themselves in `outer`, and what takes the
    place of an entry there is used from then on."""

    def __init__(self) -> None:
        self._known: dict[nn.Parameter, _StandIn] = {}
        self._entered: list[nn.Parameter] = []
        self._together: dict[nn.Parameter, Entered] = {}  # by each of those that entered a step together what they were then
        self._inside: Entered | None = None  # what is in a step now, or was in one that failed
        self._laid: set[nn.Parameter] = set()  # those that have lain side by side

    def again(self, groups: Sequence[Sequence[nn.Parameter]], gradients: Sequence[DTensor], outer: State) -> Entered | None:
        """What stands in for the parameters of `groups`, one at least, with their gradients; None where they did not enter a step together,
        or have other state now."""
        known = self._together.get(next(chain.from_iterable(groups)))
        if known is None or not known.is_of(groups, outer) or not known.put(gradients):
            return None
        self._forget(known.parameters)  # so that they enter one by one after a step that fails
        self._inside = known
        return known

    def enter_together(self, groups: Sequence[Sequence[nn.Parameter]], outer: State, joins: Collection[int] = ()) -> Entered:
        """As `enter`, of all that a step has, side by side in the groups that `join`; `leave_together` is its end."""
        self._inside = None  # a step that failed had gradients
        inner = defaultdict[Any, dict[str, Any]](dict)
        for each in chain.from_iterable(groups):
            self.enter(each, outer, inner)
        self._forget(self._entered)
        self._entered.clear()
        self._inside = Entered(groups, self._known, outer, inner, joins, self._laid)
        return self._inside

    def leave_together(self, outer: State) -> None:
        together, self._inside = self._inside, None
        assert together is not None, "nothing has entered"
        if together.is_left():
            together.end_step()
            self._together.update(dict.fromkeys(together.parameters, together))
            return
        together.dissolve()
        self._entered[:] = together.parameters
        self.leave(outer, together.inner)

    def _forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """All with whom these entered a step: what some of them have is not what they had together."""
        for each in list(parameters):
            if (known := self._together.get(each)) is not None:
                for other in known.parameters:
                    self._together.pop(other, None)

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
            held = entries.get(key)
            if not is_part(key, value, known.local):
                entries[key] = value
            elif not isinstance(held, DTensor) or local_part(held) is not value:
                entries[key] = like(parameter, value)
        self._known[parameter] = _StandIn(known.local, state, entries, tuple(state.values()), tuple(entries.values()))


def joining(optimizer: Optimizer) -> set[int]:
    """The groups of which parameters may be stepped side by side. A class that nobody knows may ask for the shape of one; torch's fused
    kernels round otherwise at its end."""
    if scope_of(optimizer) != "element":
        return set()
    return {number for number, group in enumerate(optimizer.param_groups) if not group.get("fused")}


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
