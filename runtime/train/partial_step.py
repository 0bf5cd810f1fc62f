"""A torch optimizer called for some of its parameters at a time: its own code does the update, its groups and state stay in place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._torch import FakeTensorMode, fake_mode
from autopar.driver.optimizers import scope_of
from autopar.runtime._torch import has_step_hooks, local_part
from autopar.runtime.train.own_options import Counts, counts_of, refuse_changed
from autopar.runtime.train.placed import WholeParameters
from autopar.runtime.train.runs import State
from autopar.runtime.train.stand_ins import StandIns, check_parts, joining, parts_of_state

T = TypeVar("T", bound=torch.Tensor)


class PartialStep:
    """Steps `optimizer` for the parameters that are named, and leaves the others as they are.

    While it steps, `param_groups` have these parameters alone; learning rates and other options are read from them, as ever. With
    `on_parts` it sees this rank's parts of DTensors as plain tensors, which is quicker, and right for what goes element by element;
    state is handed on as DTensors, under the parameters themselves, and what takes the place of an entry there is used from then on.
    Those in `wholes` it sees whole, one after another unless an update is `joint`, of all at once; so is their state. Parameters that are
    `stored` stay in the memory where they are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        on_parts: bool = False,
        wholes: WholeParameters | None = None,
        joint: bool = False,
        stored: bool = False,
    ) -> None:
        self.optimizer, self._on_parts, self.wholes, self._is_joint, self._is_stored = optimizer, on_parts, wholes, joint, stored
        self._stand_ins = StandIns()
        self._is_unknown = scope_of(optimizer) == "model"
        self._before: Counts | None = None

    def begin(self) -> None:
        """What is stepped from now on makes a new step."""
        self._before = None

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """By the gradients that they have. Raises `AutoparError` where an earlier part of the step changed what this one reads, too."""
        wholes = [each for each in parameters if self.wholes is not None and each in self.wholes]
        if wholes and not self._is_joint:
            # One whole parameter in memory at a time.
            for each in wholes:
                self._step_together([each])
            parameters = [each for each in parameters if self.wholes is None or each not in self.wholes]
        if parameters:
            self._step_together(parameters)

    def _watch(self) -> None:
        counts = counts_of(self.optimizer)
        if self._before is None:
            self._before = counts
        refuse_changed(self.optimizer, self._before, counts)

    def _step_together(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._is_unknown:
            self._watch()
        if self._on_parts and not has_step_hooks(self.optimizer) and all(isinstance(each, DTensor) for each in parameters):
            self._step_side_by_side(parameters)
            return
        chosen: dict[int, torch.Tensor] = {}
        wholes: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            for each in parameters:
                chosen[id(each)] = self._stood_in_for(each)
                if self.wholes is not None and each in self.wholes:
                    wholes.append((each, chosen[id(each)]))
            with narrowed(self.optimizer, by_group(self.optimizer, chosen)):
                self.optimizer.step()
        finally:
            for each, whole in wholes:
                if whole in self.optimizer.state:
                    self.optimizer.state[each] = self.optimizer.state.pop(whole)
        for each, whole in wholes:
            assert self.wholes is not None and isinstance(each, DTensor)
            self.wholes.put(each, whole)
        self._stand_ins.leave(self.optimizer.state, self.optimizer.state)

    def _step_side_by_side(self, parameters: Sequence[nn.Parameter]) -> None:
        """Plain tensors of all at once, and of those that lie one behind the other pieces."""
        optimizer = self.optimizer
        groups = by_group(optimizer, {id(each): each for each in parameters})
        gradients = [each.grad for each in chain.from_iterable(groups) if isinstance(each.grad, DTensor)]
        if not gradients:  # of parameters that the optimizer does not have
            with narrowed(optimizer, groups):
                optimizer.step()
            return
        entered = self._stand_ins.again(groups, gradients, optimizer.state)
        if entered is None:
            entered = self._stand_ins.enter_together(groups, optimizer.state, () if self._is_stored else joining(optimizer))
        # Whoever has put a function there, a schedule of learning rates among them, counts the steps.
        is_counted = "step" in vars(optimizer)
        for each in entered.rounds([{}] * len(groups) if is_counted else optimizer.param_groups):
            with narrowed(optimizer, each, entered.inner):
                optimizer.step()
        self._stand_ins.leave_together(optimizer.state)

    def finish(self) -> None:
        """All is done by then."""

    def state_tensors(self) -> list[torch.Tensor]:
        """What the optimizer holds."""
        return [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise `AutoparError` for state that somebody put there and that cannot be this rank's part: before a step, since other ranks may
        have none."""
        if not self._on_parts:
            return
        for each in parameters:
            outer = self.optimizer.state.get(each)
            if outer and isinstance(each, DTensor) and not self._stand_ins.knows(each, self.optimizer.state):
                check_parts(parts_of_state(outer), local_part(each))

    def _stood_in_for(self, parameter: nn.Parameter) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        if self.wholes is not None and parameter in self.wholes:
            whole = self.wholes.gather(parameter)
            if parameter in self.optimizer.state:
                self.optimizer.state[whole] = self.optimizer.state.pop(parameter)
            return whole
        return self._stand_ins.enter(parameter, self.optimizer.state, self.optimizer.state) if self._on_parts else parameter


def by_group(optimizer: Optimizer, chosen: Mapping[int, T]) -> list[list[T]]:
    """What stands for parameters, `chosen` by their ids, group by group."""
    return [[chosen[id(each)] for each in group["params"] if id(each) in chosen] for group in optimizer.param_groups]


@contextmanager
def narrowed(optimizer: Optimizer, chosen: Sequence[Sequence[torch.Tensor]], state: State | None = None) -> Generator[None]:
    """While it is entered, `optimizer` has what is `chosen` of each group alone, and this `state` if one is given."""
    groups, wholes, own = optimizer.param_groups, [group["params"] for group in optimizer.param_groups], optimizer.state
    try:
        for group, params in zip(groups, chosen, strict=True):
            group["params"] = list(params)
        optimizer.param_groups = [group for group in groups if group["params"]]
        optimizer.state = own if state is None else state
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, own
        for group, params in zip(groups, wholes, strict=True):
            group["params"] = params


def made_of(
    make: Callable[[list[nn.Parameter]], Optimizer], parameters: Iterable[nn.Parameter], held: Iterable[nn.Parameter], device: torch.device
) -> Optimizer:
    """What `make` makes of all `parameters` of a model, in its order, with those alone that are `held` here.

    Others, which lie with another stage, have stand-ins without memory on `device`: what is taken by its place or its shape is the same on
    all ranks. They are taken out of the groups, which may be left without parameters, and out of the state.
    """
    held = list(held)
    mine, mode = {id(each) for each in held}, fake_mode()
    given = [each if id(each) in mine else _stand_in(each, device, mode) for each in parameters]
    try:
        optimizer = make(given)
    except Exception:  # whatever it is: stand-ins have neither numbers nor names
        if len(given) == len(held):
            raise
        return make(held)
    strange = {id(each) for each in given} - mine
    for group in optimizer.param_groups:
        is_mine = [id(each) not in strange for each in group["params"]]
        for key in ("params", "param_names"):  # names are there where they were given
            if key in group:
                group[key][:] = compress(group[key], is_mine)
    for each in [each for each in optimizer.state if id(each) in strange]:
        del optimizer.state[each]
    return optimizer


def _stand_in(parameter: nn.Parameter, device: torch.device, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=parameter.requires_grad)
