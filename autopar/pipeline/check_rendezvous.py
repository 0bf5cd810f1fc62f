"""What no rank can see alone: that sends meet receives, and that everybody gets to the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from autopar.pipeline.fault import Fault, describe, fault_at, place
from autopar.pipeline.program import Channel, PipelineProgram, Receive, Send, Wait


class _Launched(NamedTuple):
    """A send or receive and where it is launched."""

    rank: int
    position: int
    what: Send | Receive


Launches = dict[Channel, list[_Launched]]


def check_rendezvous(program: PipelineProgram) -> list[Fault]:
    """Every channel whose ends differ, and the ranks that would wait for ever."""
    sends: Launches = defaultdict(list)
    receives: Launches = defaultdict(list)
    for rank, row in enumerate(program.ranks):
        for position, each in enumerate(row):
            if isinstance(each, Send):
                sends[each.channel(rank)].append(_Launched(rank, position, each))
            elif isinstance(each, Receive):
                receives[each.channel(rank)].append(_Launched(rank, position, each))
    found: list[Fault] = []
    for channel in sorted(sends.keys() | receives.keys()):
        found += _match(program, channel, sends[channel], receives[channel])
    return [*found, *_run(program, sends, receives)]


def _match(program: PipelineProgram, channel: Channel, sends: list[_Launched], receives: list[_Launched]) -> Iterator[Fault]:
    """The k-th send and the k-th receive carry the same value. Only the first difference is named: it shifts all that follow."""
    for number, (send, receive) in enumerate(zip(sends, receives, strict=False)):
        if send.what.transfer != receive.what.transfer:
            yield Fault(
                f"send and receive number {number + 1} from rank {channel[0]} to rank {channel[1]} carry different values",
                describe(program, receive.rank, receive.position),
                f"the value of {describe(program, send.rank, send.position)}",
                f"{receive.what}",
                "launch receives in the order in which the peer sends",
                places=(place(program, *receive[:2]), place(program, *send[:2])),
            )
            return
    count = min(len(sends), len(receives))
    for send in sends[count:]:
        yield fault_at(
            program, *send[:2], "nobody receives this", f"a receive on rank {channel[1]}", f"{len(receives)} receives of {len(sends)} sends"
        )
    for receive in receives[count:]:
        yield fault_at(
            program, *receive[:2], "nobody sends this", f"a send on rank {channel[0]}", f"{len(sends)} sends of {len(receives)} receives"
        )


def _run(program: PipelineProgram, sends: Launches, receives: Launches) -> Iterator[Fault]:
    """Let every rank run until a WAIT whose other end is not launched yet; when nobody can advance, say who waits for whom."""
    numbers = {
        (each.rank, each.what): number for row in (*sends.values(), *receives.values()) for number, each in reversed([*enumerate(row)])
    }
    at = [0] * len(program.ranks)

    def other_end(rank: int) -> tuple[int, int]:
        """The peer's instruction that the WAIT at which `rank` stands asks for: (peer, position), past its end when there is none."""
        wait = program.ranks[rank][at[rank]]
        assert isinstance(wait, Wait)
        number = numbers[rank, wait.launched]
        ends = (receives if isinstance(wait.launched, Send) else sends)[wait.launched.channel(rank)]
        return wait.launched.peer, ends[number].position if number < len(ends) else -1

    def may_pass(rank: int) -> bool:
        each = program.ranks[rank][at[rank]]
        # A WAIT without a launch is named by the rank's own check.
        if not isinstance(each, Wait) or (rank, each.launched) not in numbers:
            return True
        peer, position = other_end(rank)
        return 0 <= position < at[peer] if 0 <= peer < len(at) else False

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.ranks):
            while at[rank] < len(row) and may_pass(rank):
                at[rank] += 1
                moved = True
    stuck = [rank for rank, row in enumerate(program.ranks) if at[rank] < len(row)]
    if stuck:
        yield _deadlock(program, {rank: (at[rank], *other_end(rank)) for rank in stuck}, at)


def _deadlock(program: PipelineProgram, stuck: dict[int, tuple[int, int, int]], at: list[int]) -> Fault:
    lines: list[str] = []
    for rank, (position, peer, wanted) in stuck.items():
        if wanted < 0:
            tail = f"waits for rank {peer}, which never launches the other end"
        else:
            tail = f"waits for rank {peer}, which launches the other end at its instruction {wanted} and stands at {at[peer]}"
        lines.append(f"{describe(program, rank, position)} {tail}")
    return Fault(
        "deadlock: nobody can advance",
        "across ranks",
        _cycle({rank: peer for rank, (_, peer, _) in stuck.items()}),
        "\n              ".join(lines),
        "launch before waiting for what depends on it",
        places=tuple(place(program, rank, position) for rank, (position, _, _) in stuck.items()),
    )


def _cycle(waits_for: dict[int, int]) -> str:
    """`no cycle such as rank 0 → 1 → 0`, following who waits for whom."""
    for start in waits_for:
        path = [start]
        while path[-1] in waits_for and waits_for[path[-1]] not in path:
            path.append(waits_for[path[-1]])
        if waits_for.get(path[-1]) == start:
            return f"no cycle of waits, and not rank {' → '.join(map(str, [*path, start]))}"
    return "every WAIT's other end is launched"
