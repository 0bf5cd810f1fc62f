"""Invariants of the schedules of all ranks, proved before any of them runs.

on each rank   a buffer is written once, read only while it is there, freed once and left nowhere but in the outputs
               what is launched has one WAIT, and nothing touches its sources' memory or its targets before
               what ADD sums up is written by ADD alone, and read after the last of them
               shapes fit: a fragment's inputs, a collective's source and target, what is added
across ranks   all members of a group launch the same collectives in the same order, and the orders on all groups
               fit one global order (a later launch never waits for an earlier one: what NCCL needs; gloo forgives)
               the k-th SEND and the k-th RECV of a channel carry the same: name, buffers' number, shapes and dtypes
               PAUSE comes at most once, at the same place between launches on every rank
               every rank gets to its end when a WAIT blocks until all ends are launched

`check_buffers` proves the first part, `check_rendezvous` that transfers meet and everybody gets to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from autopar.checks.buffers import check_buffers, describe, place
from autopar.checks.rendezvous import check_peers, check_rendezvous, has_transfers
from autopar.checks.violation import Violation
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Launch, Pause, Schedule


def check_schedule(schedules: Mapping[int, Schedule], mesh: Mesh) -> list[Violation]:
    """Every violation in the schedules, one per rank of `mesh`; a schedule that several ranks share is walked once."""
    found: list[Violation] = []
    walked: dict[int, int] = {}
    for rank, schedule in sorted(schedules.items()):
        if id(schedule) not in walked:
            walked[id(schedule)] = rank
            found += check_buffers(rank, schedule, mesh)
    missing = [rank for rank in range(mesh.size) if rank not in schedules]
    if missing:
        return [*found, Violation("ranks without a schedule", got=str(missing), fix=f"one schedule for each of {mesh.size} ranks")]
    strangers = check_peers(schedules, mesh)
    if strangers or any("unknown axis" in violation.what for violation in found):
        return [*found, *strangers]
    # Ranks that run one and the same list launch in one order by construction.
    disorder = list(_one_order(schedules, mesh)) if len(walked) > 1 else []
    found += disorder
    if has_transfers(schedules):
        found += check_rendezvous(schedules, mesh, is_ordered=not disorder)
    return found


class _Stop(NamedTuple):
    """A launch or PAUSE, the ranks that must meet there, and what they must agree on."""

    number: int
    instruction: Launch | Pause
    members: tuple[int, ...]
    terms: object


def _one_order(schedules: Mapping[int, Schedule], mesh: Mesh) -> Iterator[Violation]:
    """Let every rank run until its next launch or PAUSE, and past it only together with its whole group.

    When nobody can advance, no global order of the launches exists.
    """
    stops = _stops(schedules, mesh)
    at = dict.fromkeys(schedules, 0)
    ready = sorted(schedules)
    while ready:
        rank = ready.pop()
        if at[rank] == len(stops[rank]):
            continue
        stop = stops[rank][at[rank]]
        partners = {member: stops[member][at[member]] for member in stop.members if at[member] < len(stops[member])}
        if len(partners) < len(stop.members) or not all(_meet(stop, partner) for partner in partners.values()):
            continue
        for member, partner in partners.items():
            if partner.terms != stop.terms:
                yield _differs(rank, stop, member, partner, schedules)
            at[member] += 1
        ready += stop.members
    stuck = {rank: stops[rank][position] for rank, position in at.items() if position < len(stops[rank])}
    if stuck:
        yield _deadlock(stuck)


def _stops(schedules: Mapping[int, Schedule], mesh: Mesh) -> dict[int, list[_Stop]]:
    group = cache(mesh.group)
    everybody = tuple(sorted(schedules))
    stops: dict[int, list[_Stop]] = {rank: [] for rank in schedules}
    for rank, schedule in schedules.items():
        for number, each in enumerate(schedule.instructions):
            if isinstance(each, Launch):
                terms = each.collective, each.kind, each.axes, schedule.shape_of(each.source)
                stops[rank].append(_Stop(number, each, group(rank, each.axes), terms))
            elif isinstance(each, Pause):
                stops[rank].append(_Stop(number, each, everybody, None))
    return stops


def _meet(stop: _Stop, other: _Stop) -> bool:
    """Whether two ranks stand at launches of the same group, or both at PAUSE."""
    return stop.members == other.members and isinstance(stop.instruction, Pause) == isinstance(other.instruction, Pause)


def _differs(rank: int, stop: _Stop, member: int, other: _Stop, schedules: Mapping[int, Schedule]) -> Violation:
    def tell(where: int, what: _Stop) -> str:
        layout = schedules[where].shape_of(what.instruction.source) if isinstance(what.instruction, Launch) else None
        return place(where, what.number, what.instruction) + (f" of {describe(layout)}" if layout else "")

    fix = "all members of a group launch the same collective, kind, shape and dtype"
    return Violation("two ranks of a group launch different collectives", "across ranks", tell(rank, stop), tell(member, other), fix)


def _deadlock(stuck: dict[int, _Stop]) -> Violation:
    lines = []
    for rank, stop in sorted(stuck.items()):
        others = ", ".join(str(member) for member in stop.members if member != rank)
        lines.append(f"{place(rank, stop.number, stop.instruction)} waits for rank{'s' if ',' in others else ''} {others}")
    got = "\n              ".join(lines)
    return Violation(
        "deadlock: nobody can advance",
        "across ranks",
        "one order of launches on all ranks",
        got,
        "launch collectives in one order everywhere",
    )
