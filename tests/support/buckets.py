"""Buckets drawn at random, any that are legal."""

from __future__ import annotations

import random

import torch

from autopar.ir.instructions import Launch, Wait
from autopar.ir.schedule import Schedule
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import BucketSizes


def random_buckets(program: ScheduleProgram, seed: int) -> BucketSizes:
    """Some partition of the reductions of a program of one place along `pp`: those of a part are of one kind, group and dtype, and all
    begin before any is waited for."""
    (schedule,) = program.places
    generator = random.Random(seed)
    members = [(position, each) for position, each in enumerate(schedule.instructions) if _may_join(each, schedule)]
    ends = {each.target: position for position, each in enumerate(schedule.instructions) if isinstance(each, Wait)}
    generator.shuffle(members)
    parts: list[list[tuple[int, Launch]]] = []
    for position, each in members:
        fitting = [
            part
            for part in parts
            if _kind(part[0][1], schedule) == _kind(each, schedule)
            and max(position, *(begin for begin, _ in part)) < min(ends[each.name], *(ends[other.name] for _, other in part))
        ]
        if fitting and generator.random() < 0.8:
            generator.choice(fitting).append((position, each))
        else:
            parts.append([(position, each)])
    return BucketSizes({}, together=tuple(frozenset(each.name for _, each in part) for part in parts))


def _may_join(each: object, schedule: Schedule) -> bool:
    if not isinstance(each, Launch) or each.collective not in ("all_reduce", "reduce_scatter"):
        return False
    tensor_type = schedule.type_of(each.name)
    return tensor_type is not None and tensor_type[1] != torch.bool


def _kind(each: Launch, schedule: Schedule) -> tuple[object, ...]:
    tensor_type = schedule.type_of(each.name)
    assert tensor_type is not None
    return each.collective, each.kind, each.axes, tensor_type[1]
