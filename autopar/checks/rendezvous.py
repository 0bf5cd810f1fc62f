"""Checks that need the schedules of all ranks: each SEND has its RECV, both carry the same values, and no rank deadlocks."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from autopar.checks.alike import Alike
from autopar.checks.buffers import describe, place
from autopar.checks.violation import Violation
from autopar.errors import ScheduleError
from autopar.ir.instructions import Channel, Launch, Pause, Receive, Send, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Schedule
from autopar.ir.turns import take_turns

_BREAK = "\n              "


def check_peers(alike: Alike) -> list[Violation]:
    """Sends and receives whose peer is not on the mesh, the first of each rank and peer."""
    found: list[Violation] = []
    for rank, schedule in alike.schedules.items():
        known: set[tuple[str, int]] = set()
        for number, each in enumerate(schedule.instructions):
            if not isinstance(each, (Send, Receive)) or (each.axis, each.peer) in known:
                continue
            known.add((each.axis, each.peer))
            try:
                each.channel(alike.mesh, rank)
            except ScheduleError as error:
                reason, here = str(error).removeprefix(f"{each}: "), ((rank, number),)
                expected = f"another rank of {alike.mesh}"
                found.append(Violation("no such peer", place(rank, number, each), expected, reason, instructions=here))
    return found


def check_rendezvous(alike: Alike, is_ordered: bool = True) -> list[Violation]:
    """Every channel whose ends differ, and the ranks that would wait for ever. All peers and axes are on the mesh.

    Without `is_ordered`, collectives fit no order, and who waits for whom is not asked: it would be the same once more.
    """
    tracks = {rank: _track(rank, alike) for rank in alike.schedules}
    found = list(_check_channels(alike.schedules, tracks, alike.mesh))
    return [*found, *_check_end(alike.schedules, tracks)] if is_ordered else found


MeetingKind = Literal["collective", "transfer", "pause"]


class _Meeting(NamedTuple):
    """Collective `number` of a group, transfer `number` of a channel, or PAUSE: where `members` meet. The group lies along `axes`."""

    kind: MeetingKind
    members: tuple[int, ...]
    axes: tuple[str, ...]
    number: int


@dataclass
class _Track:
    """By its number in the list, where a rank launches its end of what, and where it may have to wait for what."""

    launches: dict[_Meeting, int] = field(default_factory=dict[_Meeting, int])
    stops: list[tuple[int, _Meeting]] = field(default_factory=list[tuple[int, _Meeting]])


def _track(rank: int, alike: Alike) -> _Track:
    track, everybody = _Track(), tuple(alike.schedules)
    counts: dict[tuple[MeetingKind, tuple[int, ...], tuple[str, ...]], int] = defaultdict(int)
    names: dict[str, _Meeting] = {}

    @cache
    def group(axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return tuple(sorted(alike.members(rank, axes))), tuple(sorted(alike.along(axes)))

    @cache
    def channel(is_send: bool, axis: str, peer: int) -> Channel:
        return (Send if is_send else Receive)("", axis, peer, ()).channel(alike.mesh, rank)

    def launch(number: int, kind: MeetingKind, members: tuple[int, ...], axes: tuple[str, ...] = ()) -> _Meeting:
        meeting = _Meeting(kind, members, axes, counts[kind, members, axes])
        counts[kind, members, axes] += 1
        track.launches[meeting] = number
        return meeting

    for number, each in enumerate(alike.schedules[rank].instructions):
        if isinstance(each, Launch):
            names[each.name] = launch(number, "collective", *group(each.axes))
        elif isinstance(each, (Send, Receive)):
            names[each.transfer] = launch(number, "transfer", channel(isinstance(each, Send), each.axis, each.peer))
        elif isinstance(each, Pause):
            track.stops.append((number, launch(number, "pause", everybody)))
        elif isinstance(each, Wait) and each.target in names:  # a WAIT without a launch is named by the rank's own check
            track.stops.append((number, names[each.target]))
    return track


class _End(NamedTuple):
    """One end of a transfer; `half` counts the PAUSEs before it."""

    rank: int
    number: int
    what: Send | Receive
    half: int

    def __str__(self) -> str:
        return place(self.rank, self.number, self.what)

    def violation(self, what: str, expected: str, got: str, fix: str = "", other: _End | None = None) -> Violation:
        """At this end, and at the other where it is about both."""
        here = tuple((end.rank, end.number) for end in (self, other) if end is not None)
        return Violation(what, str(self), expected, got, fix, instructions=here)


def _check_channels(schedules: Mapping[int, Schedule], tracks: Mapping[int, _Track], mesh: Mesh) -> Iterator[Violation]:
    """On every channel the k-th send and the k-th receive carry the same.

    Channels between ranks that run the same two schedules are equal, and looked at once.
    """
    ends: dict[Channel, tuple[list[_End], list[_End]]] = defaultdict(lambda: ([], []))
    for rank, track in tracks.items():
        pauses = [number for number, meeting in track.stops if meeting.kind == "pause"]
        for meeting, number in track.launches.items():
            what = schedules[rank].instructions[number]
            if isinstance(what, (Send, Receive)):
                source, target = meeting.members
                ends[source, target][rank == target].append(_End(rank, number, what, bisect(pauses, number)))
    seen: set[object] = set()
    for channel, (sends, receives) in sorted(ends.items()):
        axis = (sends or receives)[0].what.axis
        kind = (axis, *((id(schedules[rank]), mesh.coordinates(rank)[axis]) for rank in channel))
        if kind not in seen:
            seen.add(kind)
            yield from _match(channel, sends, receives, schedules)


def _match(channel: Channel, sends: list[_End], receives: list[_End], schedules: Mapping[int, Schedule]) -> Iterator[Violation]:
    between = f"from rank {channel[0]} to rank {channel[1]}"
    for number, (send, receive) in enumerate(zip(sends, receives, strict=False), 1):
        what = f"send and receive number {number} {between}"
        if send.what.transfer != receive.what.transfer:
            # It shifts all that follow.
            fix = "receive in the order of the sends"
            yield receive.violation(f"{what} are different transfers", str(send), str(receive.what), fix, send)
            return
        if send.half != receive.half:
            expected = f"the side of {send}"
            yield receive.violation(f"{what} lie on different sides of PAUSE", expected, "the other", "move one of them", send)
        yield from _match_buffers(what, send, receive, schedules)
    count = f"{len(sends)} sends and {len(receives)} receives {between}"
    if len(sends) > len(receives):
        yield sends[len(receives)].violation("nobody receives this", f"a RECV on rank {channel[1]}", count)
    elif len(receives) > len(sends):
        yield receives[len(sends)].violation("nobody sends this", f"a SEND on rank {channel[0]}", count)


def _match_buffers(what: str, send: _End, receive: _End, schedules: Mapping[int, Schedule]) -> Iterator[Violation]:
    mine, theirs = send.what.buffers, receive.what.buffers
    if len(mine) != len(theirs):
        expected, got = f"{len(mine)} as in {send}", str(len(theirs))
        yield receive.violation(f"{what} carry different numbers of buffers", expected, got, "list the same values", send)
        return
    for name, other in zip(mine, theirs, strict=True):
        sent, wanted = schedules[send.rank].type_of(name), schedules[receive.rank].type_of(other)
        if sent is not None and wanted is not None and sent != wanted:
            expected, got = f"{describe(sent)}, as {name} in {send}", f"{describe(wanted)} for {other}"
            fix = "set the receiver's shape from the sender's"
            yield receive.violation(f"{what} differ in shape or dtype", expected, got, fix, send)


def _check_end(schedules: Mapping[int, Schedule], tracks: Mapping[int, _Track]) -> Iterator[Violation]:
    """Let every rank run until a WAIT of which some end is not launched; when nobody can advance, say who waits for whom."""
    at = dict.fromkeys(tracks, 0)

    def stands(rank: int) -> int | None:
        """The number of the instruction where `rank` waits, None at its end. All launches before are done, and PAUSE as well."""
        stops = tracks[rank].stops
        return stops[at[rank]][0] if at[rank] < len(stops) else None

    def missing(meeting: _Meeting) -> list[int]:
        late: list[int] = []
        for member in meeting.members:
            number, here = tracks[member].launches.get(meeting), stands(member)
            if number is None or (here is not None and number > here):
                late.append(member)
        return late

    take_turns({rank: track.stops for rank, track in tracks.items()}, lambda rank, stop: not missing(stop[1]), at)
    stuck = {rank: track.stops[at[rank]] for rank, track in tracks.items() if at[rank] < len(track.stops)}
    if not stuck:
        return
    waits_for = {rank: missing(meeting) for rank, (_, meeting) in stuck.items()}
    lines = [_waiting(rank, stuck, waits_for[rank], schedules, tracks) for rank in stuck]
    fix = "launch before waiting for what depends on it"
    here = tuple((rank, number) for rank, (number, _) in stuck.items())
    yield Violation("deadlock: nobody can advance", "across ranks", _cycle(waits_for), _BREAK.join(lines), fix, instructions=here)


def _waiting(
    rank: int, stuck: dict[int, tuple[int, _Meeting]], late: list[int], schedules: Mapping[int, Schedule], tracks: Mapping[int, _Track]
) -> str:
    """`rank 0, instruction 3: WAIT a (RECV a pp=1 (x)) waits for rank 1, which launches it at instruction 5 and stands at 2`."""
    number, meeting = stuck[rank]
    instructions = schedules[rank].instructions
    launched = tracks[rank].launches[meeting]
    line = place(rank, number, instructions[number]) + (f" ({instructions[launched]})" if launched != number else "")
    reasons: list[str] = []
    for member in late:
        wanted = tracks[member].launches.get(meeting)
        reason = "never launches it" if wanted is None else f"launches it at instruction {wanted} and stands at {stuck[member][0]}"
        reasons.append(f"rank {member}, which {reason}")
    return f"{line} waits for {'; '.join(reasons)}"


def _cycle(waits_for: Mapping[int, list[int]]) -> str:
    """`no cycle of waits, and not rank 0 → 1 → 0`, following the first rank that each waits for."""
    first = {rank: next((each for each in late if each in waits_for), None) for rank, late in waits_for.items()}
    for start in first:
        path: list[int] = [start]
        while (following := first[path[-1]]) is not None and following not in path:
            path.append(following)
        if following is not None:
            return f"no cycle of waits, and not rank {' → '.join(map(str, [*path[path.index(following) :], following]))}"
    return "all ends of what a WAIT names are launched"
