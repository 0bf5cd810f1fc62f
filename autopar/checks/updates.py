"""Invariants of UPDATE: which gradient of what parameter, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from autopar.checks.buffers import describe, place
from autopar.checks.violation import Violation
from autopar.cost.last_reads import reads
from autopar.ir.instructions import Launch, Update
from autopar.ir.schedule import Schedule, TensorType


def check_updates(rank: int, schedule: Schedule) -> list[Violation]:
    """Every violation that shows on `rank` alone.

    An UPDATE names as many gradients as parameters, of the same shapes, in their dtypes or in half of float32; what it updates is a
    parameter, as often as `schedule.versions` says, in most once; its gradient is no addend that a collective sums up; nobody uses the
    memory of the parameter afterwards, be it as a view.
    """
    updates = [(number, each) for number, each in enumerate(schedule.instructions) if isinstance(each, Update)]
    return list(_violations(rank, schedule, updates)) if updates else []


def _violations(rank: int, schedule: Schedule, updates: list[tuple[int, Update]]) -> Iterator[Violation]:
    done: dict[str, int] = {}  # the first of each
    times, allowed = Counter[str](), schedule.versions.num_updates
    for number, update in updates:
        where, here = place(rank, number, update), ((rank, number),)
        if len(update.parameters) != len(update.gradients):
            expected, got = str(len(update.parameters)), str(len(update.gradients))
            yield Violation("an UPDATE has one gradient for each parameter", where, expected, got, instructions=here)
        for parameter, gradient in zip(update.parameters, update.gradients, strict=False):
            times[parameter] += 1
            if times[parameter] == allowed + 1:
                got, expected = f"before by instruction {done[parameter]}", f"{allowed} UPDATEs" if allowed > 1 else "one UPDATE"
                what = f"parameter {parameter} is updated {'twice' if allowed == 1 else f'{allowed + 1} times'}"
                yield Violation(what, where, expected, got, "leave one out", instructions=here)
            done.setdefault(parameter, number)
            for what, expected, got in _misfits(schedule, parameter, gradient):
                yield Violation(what, where, expected, got, instructions=here)
    for number, instruction, used in reads(schedule):
        for parameter in used:
            if done.get(parameter, number) < number:
                what = f"parameter {parameter} is read after its UPDATE"
                got, here = f"updated by instruction {done[parameter]}", ((rank, number),)
                yield Violation(what, place(rank, number, instruction), "the value before", got, "update it later", instructions=here)


def _misfits(schedule: Schedule, parameter: str, gradient: str) -> Iterator[tuple[str, str, str]]:
    """What is wrong with this gradient for this parameter, what should be there, and what is."""
    items = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    if parameter not in {name for item, name in items if item.kind == "parameter"}:
        yield f"buffer {parameter} is updated, and is no parameter", "a parameter", parameter
    launches = (each for each in schedule.instructions if isinstance(each, Launch) and each.kind == "sum")
    total = next((each for each in launches if gradient in each.sources), None)
    if total is not None:
        yield f"parameter {parameter} is updated by {gradient}, a part of a sum", f"what {total} gives", gradient
    wanted, given = schedule.type_of(parameter), schedule.type_of(gradient)
    if wanted is not None and given is not None and given != wanted and not _is_held_low(wanted, given):
        yield f"gradient {gradient} does not fit parameter {parameter}", describe(wanted), describe(given)


def _is_held_low(parameter: TensorType, gradient: TensorType) -> bool:
    return parameter[0] == gradient[0] and parameter[1] == torch.float32 and gradient[1] in (torch.float16, torch.bfloat16)


def check_holders(schedules: Mapping[int, Schedule]) -> list[Violation]:
    """A rank that holds a parameter and leaves it as it is, while another updates it, drifts away from that."""
    updated = {id(schedule): _updated(schedule) for schedule in schedules.values()}
    everywhere = frozenset().union(*updated.values())
    found: list[Violation] = []
    for rank, schedule in sorted(schedules.items()):
        held = {item.name for item in schedule.signature.inputs_of("parameter")}
        for name in sorted(held & everywhere - updated[id(schedule)]):
            what = f"parameter {name} is not updated on rank {rank}, which holds it as well"
            found.append(Violation(what, f"rank {rank}", "an UPDATE on every rank that holds it", "none", "update it there, too"))
    return found


def _updated(schedule: Schedule) -> frozenset[str]:
    names = {name for each in schedule.instructions if isinstance(each, Update) for name in each.parameters}
    items = zip(schedule.signature.inputs, schedule.inputs, strict=True)
    return frozenset(item.name for item, name in items if item.kind == "parameter" and name in names)
