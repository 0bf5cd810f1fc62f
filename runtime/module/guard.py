"""Whether the model is still what a program was made of: asked before every call, so that no call runs a stale program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.runtime.module.description import ParameterForm, Watch, changes, describe


class _State(NamedTuple):
    number: int
    entries: dict[str, object]
    watch: Watch


class ModelGuard:
    """Numbers the states that a model goes through, by its settings: submodules, hooks, modes, plain attributes, what they hold.

    A model that returns to a state gets that state's number, so that its programs serve again. Values of parameters and buffers are
    no settings. Only captured states have numbers of their own; any other state gets the next free number, so that ranks which refuse
    a call still agree. What forward itself writes to its modules (a cached mask, a counter) is left out: the program keeps it as it
    was captured, and warns where that may matter.

    On processes (`is_placed`) parameters lie on ranks from the first capture on, and plain ones that are put in the place of such are to.
    """

    def __init__(self, model: nn.Module, is_placed: bool = False) -> None:
        self._model, self._is_placed = model, is_placed
        self._lying: dict[str, tuple[str, object]] = {}
        self._states: list[dict[str, object]] = []
        self._watches: dict[int, Watch] = {}
        self._written: frozenset[str] = frozenset()
        self._parameter_forms: dict[str, ParameterForm] | None = None
        self._latest: _State | None = None
        self._captured = 0

    def state(self, place: Callable[[Sequence[str]], None] = lambda _: None) -> int:
        """The number of the state that the model is in, once `place` has placed what was `to_place`. Raises `PlanError` where its
        parameters are not those of the first capture, or are not parameters."""
        for number in sorted(self._watches, key=lambda number: number != self._captured):
            if self._watches[number].is_unchanged():
                self._latest = _State(number, self._states[number], self._watches[number])
                return number
        description = describe(self._model, self._written)
        _check_stand_ins(description.stand_ins)
        if self._parameter_forms is not None:
            self._refuse(_differing(self._parameter_forms, description.parameters))
            if new := self.to_place():
                place(new)
                description = describe(self._model, self._written)
            self._refuse(self._lying_otherwise())
        known = (number for number, entries in enumerate(self._states) if entries == description.entries)
        self._latest = _State(next(known, len(self._states)), description.entries, description.watch)
        if self._latest.number < len(self._states):
            self._watches[self._latest.number] = description.watch
        return self._latest.number

    def to_place(self) -> list[str]:
        """The plain parameters that were put in the place of placed ones and are like these otherwise."""
        if not self._is_placed or self._parameter_forms is None:
            return []
        plain = [(name, each) for name, each in self._model.named_parameters() if not isinstance(each, DTensor) and not each.is_meta]
        return [name for name, each in plain if self._parameter_forms.get(name) == (tuple(each.shape), each.dtype, name)]

    def _lying_otherwise(self) -> list[str]:
        now = _lying(self._model) if self._is_placed else {}
        return [f"parameter {name!r} lay {was[0]} and lies {now[name][0]}" for name, was in self._lying.items() if now[name] != was]

    def _refuse(self, problems: Sequence[str]) -> None:
        """Parameters have their places, and optimizers their states: another set of them is another model."""
        if not problems:
            return
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        again = "Change them before autopar.compile, or compile the changed model again"
        # What is placed cannot be compiled again, and nobody knows where what was moved to other names lies.
        anew = (
            "On processes change a model that is built anew: load parallel.full_state_dict(), taken before the change, into it, change it, "
            "and compile that"
        )
        raise PlanError(
            f"the parameters of the model changed since it was captured: {'; '.join(problems[:3])}{more}. "
            f"{anew if self._is_placed else again}"
        )

    def trainable(self) -> tuple[bool, ...]:
        """Which parameters get gradients, in their order; of the model as `state` has just seen it."""
        assert self._latest is not None
        return tuple([parameter.requires_grad for parameter in self._latest.watch.parameters])

    def seen(self) -> object:
        """Stands for the modules, parameters and buffers that `state` has just seen: another object wherever one of them is another."""
        return self._latest and self._latest.watch

    def changes(self) -> str:
        """How the model differs from what it was at the latest capture, in words; empty where it does not."""
        return changes(self._states[self._captured], self._latest.entries) if self._states and self._latest else ""

    def let_go(self) -> None:
        """Hold none of the model's tensors until it is `captured`: as parameters are placed, each is freed before the next takes memory."""
        assert self._latest is not None
        self._latest = self._latest._replace(watch=Watch([], [], [], []))

    def captured(self, written: Collection[str]) -> None:
        """Note that the model was captured in its latest state, as the capture left it. `written`: the attributes that forward writes."""
        assert self._latest is not None
        self._written |= frozenset(written)
        self._states = [{path: value for path, value in state.items() if not self._is_written(path)} for state in self._states]
        description, self._captured = describe(self._model, self._written), self._latest.number
        self._states[self._captured : self._captured + 1] = [description.entries]
        self._watches = {self._captured: description.watch}
        # Not as they were before the capture, which may have replaced the parameters.
        self._latest = _State(self._captured, description.entries, description.watch)
        self._parameter_forms = self._parameter_forms or description.parameters
        if self._is_placed:
            self._lying = self._lying or _lying(self._model)

    def copied(self, model: nn.Module) -> ModelGuard:
        """A guard for a deep copy of the model, which knows the states that were captured here."""
        guard = ModelGuard(model, self._is_placed)
        guard._states, guard._written, guard._parameter_forms = list(self._states), self._written, self._parameter_forms
        guard._captured, guard._lying = self._captured, self._lying
        return guard

    def _is_written(self, path: str) -> bool:
        return any(path == written or path.startswith((f"{written}[", f"{written}.")) for written in self._written)


def _check_stand_ins(names: Sequence[str]) -> None:
    """A tensor in a parameter's place would be a constant of the program, and without a gradient."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise PlanError(
            f"a plain tensor stands in the place of parameter {', '.join(map(repr, names[:3]))}{more}, as torch.func.functional_call "
            "puts it there for one call. A parallel module computes with its own parameters and gives these gradients: write the values "
            "into them (with torch.no_grad(): parameter.copy_(value)), or call the model without autopar"
        )


def _differing(before: dict[str, ParameterForm], now: dict[str, ParameterForm]) -> list[str]:
    problems = [f"parameter {name!r} is gone" for name in before if name not in now]
    problems += [f"{name!r} is a new parameter" for name in now if name not in before]
    for name in before:
        if name in now and before[name] != now[name]:
            problems.append(f"parameter {name!r} was {_form(name, before[name])} and is {_form(name, now[name])}")
    return problems


def _lying(model: nn.Module) -> dict[str, tuple[str, object]]:
    """Where the parameters of `model` lie on processes, in words, and on which mesh; those of another stage are on meta."""
    found: dict[str, tuple[str, object]] = {}
    for name, each in model.named_parameters():
        if isinstance(each, DTensor) and not each.is_meta:
            found[name] = f"as {each.placements}", each.device_mesh
        else:
            found[name] = f"on {each.device.type}", None
    return found


def _form(name: str, form: ParameterForm) -> str:
    shape, dtype, first = form
    tied = f", tied to {first!r}" if first != name else ""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}{tied}"
