"""Runs passes one after another, and tells observers what happened between them.

    program = run_passes(program, passes, (Log(), Checker(), History()))

Checking, timing, printing and keeping intermediate programs are observers; no pass knows of any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch

from autopar.driver.compiled import PassRun, SchedulePassRun
from autopar.driver.decide_once import FromFirst, SharedDecision, decide_once
from autopar.driver.garbage import Pile
from autopar.driver.remade import Remade, as_now
from autopar.errors import AutoparError
from autopar.ir.printing import print_program
from autopar.ir.program import Form, Program
from autopar.pipeline.schedule_program import ScheduleProgram

logger = logging.getLogger("autopar")


@runtime_checkable
class Pass(Protocol):
    """A mechanical rewrite: a frozen dataclass whose fields are its options.

    Its docstring states *Reads* (what must hold of the program it is given), *Writes* (the keys and nodes it
    sets) and *Ensures* (what holds afterwards). `apply` takes a program in the form that the pass is for, a `Program` or a
    `ScheduleProgram`, returns a new one, or the given one where it has nothing to do, and leaves the given one as it was. A copy of
    the given `Program` in which nothing was changed counts as the given one.
    """

    @property
    def name(self) -> str: ...

    def apply(self, program: Any) -> Program | ScheduleProgram: ...


@runtime_checkable
class DecidingPass(Protocol):
    """A pass that first decides (pure: the program in, a printable value out), then applies the decision."""

    @property
    def name(self) -> str: ...

    def decide(self, program: Any) -> Any: ...

    def apply(self, program: Any, decision: Any) -> Program | ScheduleProgram: ...


Decided = TypeVar("Decided", covariant=True)


class Decides(Protocol[Decided]):
    """A deciding pass, by what it decides."""

    def decide(self, program: Any) -> Decided: ...


# Called with the step after every pass, and before the first one with step 0, the program as it was captured.
Observer = Callable[[PassRun | SchedulePassRun], None]
CAPTURE = "capture"


def text_of(program: Program | ScheduleProgram) -> str:
    """A program as people read it, in whatever form it is."""
    return print_program(program) if isinstance(program, Program) else str(program)


@dataclass
class Log:
    """One line a pass through `logging.getLogger("autopar")`: number, name, seconds, nodes before → after."""

    level: int = logging.INFO
    nodes: int = 0

    def __call__(self, step: PassRun | SchedulePassRun) -> None:
        count = step.program.num_nodes if isinstance(step.program, Program) else step.program.num_instructions
        what = "nodes" if isinstance(step.program, Program) else "instructions"
        logger.log(self.level, "%3d  %-24s %7.2f s   %d → %d %s", step.number, step.name, step.seconds, self.nodes, count, what)
        self.nodes = count


@dataclass(frozen=True)
class Next:
    """Shows the name of the pass that comes next."""

    passes: Sequence[Pass | DecidingPass]
    show: Callable[[str], None]

    def __call__(self, step: PassRun | SchedulePassRun) -> None:
        if step.number < len(self.passes):
            self.show(self.passes[step.number].name)


@dataclass
class History:
    """Keeps every step: the program and the decision after each pass.

    Where it says which graphs are `held_before` a pass, by the classes of passes, others of GLOBAL and LOCAL are made again when asked for,
    but for the first and the last of each. `within` is what surrounds passes that run again.
    """

    held_before: frozenset[type[object]] | None = None
    within: Callable[[], AbstractContextManager[object]] = field(default_factory=lambda: partial(as_now, torch.is_grad_enabled()))
    steps: list[PassRun | SchedulePassRun] = field(default_factory=list[PassRun | SchedulePassRun])

    def __call__(self, step: PassRun | SchedulePassRun) -> None:
        before = self.steps[-1] if self.steps else None
        if self.held_before is not None and step.kind not in self.held_before and isinstance(step, PassRun) and isinstance(before, PassRun):
            self._let_go(before.held, step)
        self.steps.append(step)

    def _let_go(self, held: Program | Remade, step: PassRun) -> None:
        """Hold the program before `step` no longer, unless it is the first or the last of its form."""
        if held is step.held or held.form is not step.form or held.form is Form.FORWARD or isinstance(held, Remade):
            return
        number = next(each.number for each in self.steps if isinstance(each, PassRun) and each.held is held)
        maker, before = self.steps[number], self.steps[number - 1]
        if number == 0 or not isinstance(maker, PassRun) or not isinstance(before, PassRun) or before.form is not held.form:
            return
        assert maker.remake is not None, maker.name
        remade = Remade(before.held, maker.remake, self.within, held.form)
        self.steps[number:] = [replace(each, held=remade) for each in self.steps[number:] if isinstance(each, PassRun)]

    def step(self, chosen: type[object] | str) -> PassRun | SchedulePassRun:
        """The last step of a pass, by its class or name. Raises `AutoparError` naming the passes that ran."""
        for step in reversed(self.steps):
            if chosen in (step.name, step.kind):
                return step
        name = chosen if isinstance(chosen, str) else chosen.__name__
        raise AutoparError(f"no pass {name!r} ran; these did: {', '.join(step.name for step in self.steps)}")

    def program(self, chosen: type[object] | str) -> Program:
        """The program after a pass."""
        program = self.step(chosen).program
        assert isinstance(program, Program), f"{chosen} writes a schedule"
        return program

    def before(self, chosen: type[object] | str) -> Program:
        """The program that a pass was given, whatever made it."""
        program = self.steps[self.step(chosen).number - 1].program
        assert isinstance(program, Program), f"{chosen} is given a schedule"
        return program

    def schedule(self, chosen: type[object] | str) -> ScheduleProgram:
        """The schedule after a pass."""
        program = self.step(chosen).program
        assert isinstance(program, ScheduleProgram), f"{chosen} writes a graph"
        return program

    def schedule_before(self, chosen: type[object] | str) -> ScheduleProgram:
        """The schedule that a pass was given."""
        program = self.steps[self.step(chosen).number - 1].program
        assert isinstance(program, ScheduleProgram), f"{chosen} is given a graph"
        return program

    def last(self, form: Form) -> Program:
        """The program after the last pass of a form."""
        return next(step.program for step in reversed(self.graph_steps) if step.form is form)

    @property
    def graph_steps(self) -> tuple[PassRun, ...]:
        return tuple(step for step in self.steps if isinstance(step, PassRun))

    @property
    def schedule_steps(self) -> tuple[SchedulePassRun, ...]:
        return tuple(step for step in self.steps if isinstance(step, SchedulePassRun))

    def decision(self, chosen: type[Decides[Decided]]) -> Decided:
        """What a pass decided, by its class."""
        return cast("Decided", self.step(chosen).decision)


def run_passes(
    program: Any,
    passes: Sequence[Pass | DecidingPass],
    observers: Sequence[Observer] = (),
    seconds: float = 0.0,
    from_first: FromFirst | None = None,
) -> Any:
    """`program`, which took `seconds` to capture, after all passes: a `Program`, or a `ScheduleProgram` where they go that far.

    Observers are called with the captured program (step 0) and after each pass (from step 1 on). On real ranks `from_first` brings what
    rank 0 decided (`autopar.driver.decide_once`). Whatever a pass or an observer raises bears a note with the pass's number and name.
    """
    pile = Pile()
    for observe in observers:
        observe(_step(0, CAPTURE, seconds, program))
    for number, chosen in enumerate(passes, 1):
        try:
            step = _run_one(chosen, number, program, from_first)
            for observe in observers:
                observe(step)
        except Exception as error:
            error.add_note(f"in pass {number}, {chosen.name} ({type(chosen).__name__})")
            raise
        program = step.program
        pile.collect()
    return program


def _run_one(
    chosen: Pass | DecidingPass, number: int, program: Program | ScheduleProgram, from_first: FromFirst | None
) -> PassRun | SchedulePassRun:
    start = time.perf_counter()
    decision = _decision(chosen, program, from_first) if isinstance(chosen, DecidingPass) else None
    remake = partial(_applied, chosen, decision)
    result = remake(program)
    if isinstance(program, Program) and isinstance(result, Program) and result is not program and result.is_copy_of(program):
        result = program  # nothing to do: observers need not look again
    return _step(number, chosen.name, time.perf_counter() - start, result, decision, type(chosen), remake)


def _decision(chosen: DecidingPass, program: Program | ScheduleProgram, from_first: FromFirst | None) -> object:
    if from_first is not None and isinstance(chosen, SharedDecision):
        return decide_once(chosen, program, from_first)
    return chosen.decide(program)


def _applied(chosen: Pass | DecidingPass, decision: object, program: Any) -> Any:
    return chosen.apply(program, decision) if isinstance(chosen, DecidingPass) else chosen.apply(program)


def _step(
    number: int,
    name: str,
    seconds: float,
    program: Program | ScheduleProgram,
    decision: object = None,
    kind: type[Pass | DecidingPass] | None = None,
    remake: Callable[[Any], Any] | None = None,
) -> PassRun | SchedulePassRun:
    if isinstance(program, ScheduleProgram):
        return SchedulePassRun(number, name, seconds, program, decision, kind)
    return PassRun(number, name, seconds, program, decision, kind, remake)
