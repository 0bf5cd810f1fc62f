"""The step of training with its update: parameters are updated as soon as their gradients are final, which are freed then.

LAUNCH all_reduce sum dp (a, b) -> (g_a, g_b)
RUN f7 (…) -> (c)                               the backward goes on
LAUNCH all_reduce sum dp (c) -> g_c
WAIT g_a                                        once the next bucket is on its way
UPDATE (w_a, w_b) by (g_a, g_b)
FREE g_a g_b
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.last_reads import last_reads
from autopar.ir.instructions import Add, Copy, Free, Instruction, Launch, Pause, Receive, Run, Update, Wait
from autopar.ir.lifetimes import touched, with_frees
from autopar.ir.schedule import Schedule
from autopar.pipeline.schedule_program import ScheduleProgram

# When parameters are updated: as their gradients are final, so many bytes at once; or all at the end; None: never, they are handed out.
When = Literal["bucket", "end"]
# The optimizer is called at most about so often in a step: each call has its price, and what waits for its call takes memory.
MAX_UPDATES = 16


@dataclass(frozen=True)
class WriteUpdates:
    """Write UPDATE for every parameter that has a gradient; gradients are no results then.

    "bucket" updates a parameter once its gradient is final and its memory is read no more, together with others until they have a
    sixteenth of the bytes. A reduction that only its gradients wait for is waited for once the next one is launched. "end" updates all
    together at the end, for what is agreed upon first: a norm, that all are finite, or that checks of the model's values hold, of which
    a pipeline hears at its end.

    Reads: a `ScheduleProgram` that ranks can run. Writes: UPDATE, FREE; moves WAITs of gradients and what follows them.
    Ensures: every rank that holds a parameter updates it, and reads it no more.
    """

    when: When | None
    name: str = "write updates"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        gradients = [gradients_of(schedule) for schedule in program.places]
        if self.when is None or not any(gradients):
            return program
        places = [self._written(schedule, of) for schedule, of in zip(program.places, gradients, strict=True)]
        return program.with_places(places)

    def _written(self, schedule: Schedule, gradients: Mapping[str, str]) -> Schedule:
        schedule = schedule.regrouped([() if isinstance(each, Free) else (each,) for each in schedule.instructions])
        hears_late = schedule.is_over_at_pause and bool(schedule.signature.outputs_of("check"))
        if not gradients:
            pass  # a stage without parameters
        elif self.when == "end" or hears_late:
            schedule = schedule.appended([Update(tuple(gradients), tuple(gradients.values()))])
        else:
            schedule = _updated(_hoisted(schedule, frozenset(gradients.values())), gradients)
        schedule = without_gradients(schedule)
        return schedule.regrouped(with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs}))


def gradients_of(schedule: Schedule) -> dict[str, str]:
    """By the buffer of a parameter that of its gradient, in the order of the results."""
    found: dict[str, str] = {}
    for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True):
        if item.kind == "gradient":
            (parameter,) = schedule.fed["parameter", item.name]
            found[parameter] = name
    return found


def without_gradients(schedule: Schedule) -> Schedule:
    """With no gradient among its results."""
    pairs = [(item, name) for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True) if item.kind != "gradient"]
    signature = replace(schedule.signature, outputs=tuple(item for item, _ in pairs))
    return replace(schedule, outputs=tuple(name for _, name in pairs), signature=signature)


def _hoisted(schedule: Schedule, gradients: frozenset[str]) -> Schedule:
    """With each reduction that only gradients follow waited for once the next one is launched, and these computed there."""
    instructions = schedule.instructions
    others = [each for each in instructions if not isinstance(each, Wait) and not _gives_only(each, gradients)]
    read = {name for each in others for name in (each.sources if isinstance(each, Launch) else touched(each))}
    groups: list[list[Instruction]] = [[each] for each in instructions]
    written = _written_at(instructions)
    pause = next((number for number, each in enumerate(instructions) if isinstance(each, Pause)), -1)
    for launch, wait in _flights(instructions):
        number = _next_reduction(instructions, launch, wait)
        each = instructions[launch]
        assert isinstance(each, Launch)
        if number is not None and read.isdisjoint(each.targets):
            groups[number] += groups[wait]
            groups[wait] = []
            written |= dict.fromkeys(each.targets, number)
    for number, each in enumerate(instructions):
        if isinstance(each, Run) and _gives_only(each, gradients) and read.isdisjoint(each.outputs):
            ready = max((written.get(name, -1) for name in each.inputs), default=-1)
            ready = pause if ready < pause < number else ready  # where tangents come in
            if 0 <= ready < number:
                groups[ready] += groups[number]
                groups[number] = []
    return schedule.regrouped(groups)


def _gives_only(instruction: Instruction, gradients: frozenset[str]) -> bool:
    return isinstance(instruction, Run) and gradients.issuperset(instruction.outputs)


def _flights(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """The summing collectives: where each is launched, and waited for."""
    waits = {each.target: number for number, each in enumerate(instructions) if isinstance(each, Wait)}
    return [(number, waits[each.name]) for number, each in enumerate(instructions) if isinstance(each, Launch) and each.kind == "sum"]


def _next_reduction(instructions: Sequence[Instruction], launch: int, wait: int) -> int | None:
    """The next sum over the same axes that is launched before `wait`."""
    axes = [each.axes if isinstance(each, Launch) and each.kind == "sum" else None for each in instructions[: wait + 1]]
    return next((number for number in range(launch + 1, wait) if axes[number] == axes[launch]), None)


def _written_at(instructions: Sequence[Instruction]) -> dict[str, int]:
    """By buffer the number of the instruction after which it is final; -1, or nothing, for what is there from the start."""
    found: dict[str, int] = {}
    arriving: dict[str, tuple[str, ...]] = {}
    for number, each in enumerate(instructions):
        if isinstance(each, Run):
            found |= dict.fromkeys(each.outputs, number)
        elif isinstance(each, Add):
            found[each.target] = number
        elif isinstance(each, (Launch, Copy)):
            arriving[each.name] = each.targets
        elif isinstance(each, Receive):
            arriving[each.transfer] = each.buffers
        elif isinstance(each, Wait):
            found |= dict.fromkeys(arriving.pop(each.target, ()), number)
    return found


def _updated(schedule: Schedule, gradients: Mapping[str, str]) -> Schedule:
    """With UPDATEs, each behind the last instruction that it follows."""
    instructions = schedule.instructions
    final, last = _written_at(instructions), last_reads(schedule)
    # A call may fail in its first half: nothing is updated before the second.
    begin = 0 if schedule.is_over_at_pause else next((number for number, each in enumerate(instructions) if isinstance(each, Pause)), 0)
    ready = {parameter: max(final.get(gradient, begin), last[parameter], begin) for parameter, gradient in gradients.items()}
    sizes = {parameter: _num_bytes(schedule, gradient) for parameter, gradient in gradients.items()}
    limit = sum(sizes.values()) / MAX_UPDATES
    groups: list[list[Instruction]] = [[each] for each in instructions]
    names: list[str] = []
    for parameter in (ordered := sorted(ready, key=ready.__getitem__)):
        names.append(parameter)
        if sum(sizes[name] for name in names) >= limit or parameter == ordered[-1]:
            groups[ready[parameter]].append(Update(tuple(names), tuple(gradients[name] for name in names)))
            names = []
    return schedule.regrouped(groups)


def _num_bytes(schedule: Schedule, name: str) -> int:
    shape, dtype = schedule.type_of(name) or ((), None)
    return math.prod(shape) * dtype.itemsize if dtype is not None else 0
