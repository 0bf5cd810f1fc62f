"""From actions to instructions: where each send, receive and WAIT goes. A pure function that every rank can compute alone.

For each action, in order:

    RECV …         launched `prefetch` actions before the one that reads it, so that it overlaps with compute, and in the
                   order in which its sender sends: where a later value of a channel is needed first, the earlier ones
                   are launched with it
    WAIT RECV      just before the action: a true dependency, the only thing that ever blocks
    WAIT SEND      just before the first action before which the receiver is *known* to have read the value, because
                   something that came from there since was made after it; at the end of the rank where nothing told
    2F0
    SEND …         at once
    2REDUCE_GRAD   after the last backward of the stage

Why it cannot deadlock under rendezvous: launches do not block, a WAIT SEND asks for what has happened, so ranks block on
data alone, and data dependencies have no cycle when the actions have an order that meets them (`check_pipeline` proves it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autopar.pipeline.actions import Action, Edge, PipelineSchedule, backward_kinds, chain, check_edges, needs
from autopar.pipeline.program import (
    Compute,
    PipelineInstruction,
    PipelineProgram,
    Receive,
    ReduceGradients,
    Send,
    Transfer,
    Wait,
    receives_of,
    sends_of,
)

# Rank and position in its order.
_Position = tuple[int, int]


def expand(schedule: PipelineSchedule, edges: Sequence[Edge] | None = None, prefetch: int = 1) -> PipelineProgram:
    """The instructions of all ranks; `edges` says which stage feeds which (by default each the next).

    A faulty schedule is expanded as it stands, faults and all: `check_program` of `autopar.pipeline.check` names them.
    """
    edges = chain(schedule.num_stages) if edges is None else tuple(edges)
    check_edges(edges, schedule.num_stages)
    expansion = _Expansion(schedule, edges)
    ranks = tuple(expansion.rank(rank, prefetch) for rank in range(schedule.num_ranks))
    return PipelineProgram(schedule.name, schedule.stages, schedule.num_microbatches, edges, ranks)


class _Expansion:
    def __init__(self, schedule: PipelineSchedule, edges: Sequence[Edge]) -> None:
        self.schedule = schedule
        self.by_stage: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges:
            self.by_stage[edge.source].append(edge)
            self.by_stage[edge.target].append(edge)
        self.place = {action: (rank, index) for rank, order in enumerate(schedule.orders) for index, action in enumerate(order)}
        self.kinds = backward_kinds(schedule.orders)
        self.known = self._known()
        places = [(rank, action) for rank, order in enumerate(schedule.orders) for action in order]
        self.outgoing = {place: self._outgoing(*place) for place in places}
        self.incoming = {place: self._incoming(*place) for place in places}

    def holder(self, stage: int) -> int:
        return self.schedule.stages[stage] if stage < self.schedule.num_stages else -1

    def _outgoing(self, rank: int, action: Action) -> list[Send]:
        sends = (Send(each, self.holder(each.target)) for each in sends_of(action, self.by_stage[action.stage]))
        return [send for send in sends if send.peer != rank]

    def _incoming(self, rank: int, action: Action) -> list[Receive]:
        receives = (Receive(each, self.holder(each.source)) for each in receives_of(action, self.by_stage[action.stage]))
        return [receive for receive in receives if receive.peer != rank]

    def rank(self, rank: int, prefetch: int) -> tuple[PipelineInstruction, ...]:
        order = self.schedule.orders[rank]
        receives = self._receive_positions(rank, prefetch)
        last = {action.stage: position for position, action in enumerate(order) if action.kind in ("B", "W")}
        pending: list[tuple[Send, _Position | None]] = []
        row: list[PipelineInstruction] = []
        for position, action in enumerate(order):
            row += receives.get(position, ())
            row += map(Wait, self.incoming[rank, action])
            known = self.known.get((rank, position))
            if known is not None:
                row += [Wait(send) for send, reader in pending if reader and known[reader[0]] > reader[1]]
                pending = [(send, reader) for send, reader in pending if not (reader and known[reader[0]] > reader[1])]
            row.append(Compute(action))
            sends = self.outgoing[rank, action]
            row += sends
            pending += [(send, self._reader(send.transfer)) for send in sends]
            if last.get(action.stage) == position:
                row.append(ReduceGradients(action.stage))
        return (*row, *(Wait(send) for send, _ in pending))

    def _receive_positions(self, rank: int, prefetch: int) -> dict[int, list[Receive]]:
        """Before which action of `rank` each of its receives is launched, in the order of the senders' sends."""
        wanted: dict[int, dict[Transfer, int]] = defaultdict(dict)
        for position, action in enumerate(self.schedule.orders[rank]):
            for receive in self.incoming[rank, action]:
                wanted[receive.peer].setdefault(receive.transfer, max(position - prefetch, 0))
        positions: dict[int, list[Receive]] = defaultdict(list)
        for peer, transfers in wanted.items():
            sent = dict.fromkeys(each for each in self._sent(peer, rank) if each in transfers)
            queue = [*sent, *(each for each in transfers if each not in sent)]
            soonest = len(self.schedule.orders[rank])
            launches: list[tuple[int, Transfer]] = []
            for each in reversed(queue):
                soonest = min(soonest, transfers[each])
                launches.append((soonest, each))
            for position, each in reversed(launches):
                positions[position].append(Receive(each, peer))
        return positions

    def _sent(self, source: int, target: int) -> Iterator[Transfer]:
        """What `source` sends to `target`, in its order."""
        if 0 <= source < self.schedule.num_ranks:
            for action in self.schedule.orders[source]:
                yield from (send.transfer for send in self.outgoing[source, action] if send.peer == target)

    def _reader(self, transfer: Transfer) -> _Position | None:
        kind = "F" if transfer.direction == "F" else self.kinds.get((transfer.target, transfer.microbatch), "I")
        return self.place.get(Action(transfer.target, kind, transfer.microbatch))

    def _known(self) -> dict[_Position, list[int]]:
        """For each action, how many actions of every rank are certainly over when it starts. Actions caught in a cycle are left out."""
        known: dict[_Position, list[int]] = {}
        at = [0] * self.schedule.num_ranks
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.schedule.orders):
                while at[rank] < len(order):
                    places = self._needed(order[at[rank]])
                    if not all(place in known for place in places):
                        break
                    known[rank, at[rank]] = self._after(rank, at[rank], places, known)
                    at[rank] += 1
                    moved = True
        return known

    def _needed(self, action: Action) -> list[_Position]:
        wanted = needs(action, self.by_stage[action.stage], self.kinds)
        return [self.place[each] for each in wanted if each in self.place]

    def _after(self, rank: int, index: int, places: Iterable[_Position], known: dict[_Position, list[int]]) -> list[int]:
        sources = [*places, *([(rank, index - 1)] if index else [])]
        counts = [0] * self.schedule.num_ranks
        for source in sources:
            counts = list(map(max, counts, known[source]))
        for peer, position in sources:
            counts[peer] = max(counts[peer], position + 1)
        return counts
