"""Invariants of the schedules of all ranks, proved before any of them runs.

on each rank   a buffer is written once, read only while it is there, freed once and left nowhere but in the outputs
               what is launched has one WAIT, and nothing touches its sources' memory or its targets before
               what lies in host memory, or a file, only COPY reads, and what COPY gives is what it was given (`check_copies`)
               what ADD sums up is written by ADD alone, and read after the last of them
               shapes fit: a fragment's inputs, a collective's source and target, what is added
               a parameter is updated once, by its whole gradient, and read no more (`check_updates`)
across ranks   all members of a group launch the same collectives in the same order, and the orders on all groups
               fit one global order (a later launch never waits for an earlier one: what NCCL needs; gloo forgives)
               the k-th SEND and the k-th RECV of a channel carry the same: name, buffers' number, shapes and dtypes
               PAUSE comes at most once, at the same place between launches on every rank
               every rank gets to its end when a WAIT blocks until all ends are launched

               who holds a parameter that some rank updates, updates it
`check_buffers`, `check_copies`, `check_updates` and `check_versions` prove the first part, `check_rendezvous` that transfers meet and
everybody gets to the end.
Ranks that are alike (`autopar.checks.alike`) are proved once, and named by the first of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from autopar.checks.alike import Alike
from autopar.checks.buffers import check_buffers, describe, place
from autopar.checks.copies import check_copies
from autopar.checks.rendezvous import check_peers, check_rendezvous
from autopar.checks.updates import check_holders, check_updates
from autopar.checks.versions import check_versions
from autopar.checks.violation import Violation
from autopar.ir.instructions import Launch, Pause
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule


def check_schedule(
    schedules: Mapping[int, Schedule], mesh: Mesh, actions: Container[str] = frozenset(), is_executable: bool = True
) -> list[Violation]:
    """Every violation in the schedules, one per rank of `mesh`; a schedule that several ranks share is walked once.

    `actions` are what RUN may name besides fragments; what schedules may lack that are not executable yet is said at `check_buffers`.
    """
    found: list[Violation] = []
    walked: set[int] = set()
    for rank, schedule in sorted(schedules.items()):
        if id(schedule) not in walked:
            walked.add(id(schedule))
            found += check_buffers(rank, schedule, mesh, actions, is_executable)
            found += check_copies(rank, schedule)
            found += check_updates(rank, schedule)
            found += check_versions(rank, schedule)
    found += check_holders(schedules)
    missing = [rank for rank in range(mesh.size) if rank not in schedules]
    if missing:
        return [*found, Violation("ranks without a schedule", got=str(missing), fix=f"one schedule for each of {mesh.size} ranks")]
    alike = Alike.of(schedules, mesh)
    strangers = check_peers(alike)
    if strangers or any("unknown axis" in violation.what for violation in found):
        return [*found, *strangers]
    disorder = list(_one_order(alike))
    found += disorder
    if alike.has_transfers:
        found += check_rendezvous(alike, is_ordered=not disorder)
    return found


class _Stop(NamedTuple):
    """A launch or PAUSE, the ranks that must meet there, along which axes, and what they must agree on."""

    number: int
    instruction: Launch | Pause
    members: tuple[int, ...]
    along: tuple[str, ...]
    terms: object


def _one_order(alike: Alike) -> Iterator[Violation]:
    """Let every rank run until its next launch or PAUSE, and past it only together with its whole group.

    When nobody can advance, no global order of the launches exists.
    """
    schedules, stops = alike.schedules, _stops(alike)
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


def _stops(alike: Alike) -> dict[int, list[_Stop]]:
    members, along = cache(alike.members), cache(alike.along)
    everybody = tuple(sorted(alike.schedules))
    stops: dict[int, list[_Stop]] = {rank: [] for rank in alike.schedules}
    for rank, schedule in alike.schedules.items():
        for number, each in enumerate(schedule.instructions):
            if isinstance(each, Launch):
                terms = each.collective, each.kind, each.axes, each.node_size, tuple(map(schedule.type_of, each.sources))
                stops[rank].append(_Stop(number, each, members(rank, each.axes), along(each.axes), terms))
            elif isinstance(each, Pause):
                stops[rank].append(_Stop(number, each, everybody, (), None))
    return stops


def _meet(stop: _Stop, other: _Stop) -> bool:
    """Whether two ranks stand at launches of the same group, or both at PAUSE."""
    is_pause, is_other = isinstance(stop.instruction, Pause), isinstance(other.instruction, Pause)
    return (stop.members, stop.along, is_pause) == (other.members, other.along, is_other)


def _differs(rank: int, stop: _Stop, member: int, other: _Stop, schedules: Mapping[int, Schedule]) -> Violation:
    def tell(where: int, what: _Stop) -> str:
        sources = what.instruction.sources if isinstance(what.instruction, Launch) else ()
        types = [describe(found) for name in sources if (found := schedules[where].type_of(name))]
        return place(where, what.number, what.instruction) + (f" of {', '.join(types)}" if types else "")

    fix = "all members of a group launch the same collective, kind, shape and dtype"
    expected, got, here = tell(rank, stop), tell(member, other), ((rank, stop.number), (member, other.number))
    return Violation("two ranks of a group launch different collectives", "across ranks", expected, got, fix, instructions=here)


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
        instructions=tuple((rank, stop.number) for rank, stop in sorted(stuck.items())),
    )
