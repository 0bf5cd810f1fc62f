"""From actions to instructions: where each send, receive and WAIT goes. A pure function that every rank can compute alone.

For each action, in order:

    RECV 1B2>0 pp=1 (1B2>0)       launched `prefetch` actions before the one that reads it, so that it overlaps with compute,
                                  and in the order in which its sender sends: where a later value of a channel is needed
                                  first, the earlier ones are launched with it
    WAIT 1B2>0                    just before the action: a true dependency, the only thing that ever blocks
    WAIT 0F2>1                    of a send: just before the first action before which the receiver is *known* to have read the
                                  value, because something that came from there since was made after it; at the end of the
                                  rank where nothing told
    RUN 0F3 () -> (0F3>1, 0F3.I, 0F3.W)
    SEND 0F3>1 pp=1 (0F3>1)       at once
    RUN 0REDUCE_GRAD () -> ()     after the last backward of the stage

Buffers, where no graph says what is computed: what goes from stage to stage bears the name of its transfer, also where both
stages lie on one rank and nothing is sent. A forward keeps `0F3.I` until the gradients of the stage's inputs are computed, by
0I3 or 0B3, and `0F3.W` until those of its weights are, by 0W3 or 0B3.

Why it cannot deadlock under rendezvous: launches do not block, a WAIT of a send asks for what has happened, so ranks block on
data alone, and data dependencies have no cycle when the actions have an order that meets them (`check_pipeline` proves it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.ir.actions import Action, Edge, PipelineSchedule, Reduction, Transfer, backward_kinds, chain, check_edges, needs
from autopar.ir.instructions import Instruction, Receive, Run, Send, Wait
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Buffer, Schedule, Span
from autopar.ir.turns import take_turns
from autopar.pipeline.schedule_program import ScheduleProgram

# Rank and position in its order.
_Position = tuple[int, int]
AXIS = "pp"


def expand(schedule: PipelineSchedule, edges: Sequence[Edge] | None = None, prefetch: int = 1) -> ScheduleProgram:
    """The instructions of the ranks along `pp`; `edges` says which stage feeds which (by default each the next).

    A faulty schedule is expanded as it stands, faults and all: `schedule_violations` of `autopar.pipeline.check` names them.
    """
    edges = chain(schedule.num_stages) if edges is None else tuple(edges)
    check_edges(edges, schedule.num_stages)
    names = {each: str(each) for each in _transfers(schedule, edges)}
    expansion = _Expansion(schedule, edges, names)
    buffers = {name: _buffer(each) for each, name in names.items()} | _saved_buffers(schedule)
    reductions = {str(each): each for each in map(Reduction, range(schedule.num_stages))}
    ranks: list[Schedule] = []
    for rank in range(schedule.num_ranks):
        row = expansion.rank(rank, prefetch)
        spans = (
            Span(each.fragment, at, at + 1) for at, each in enumerate(row) if isinstance(each, Run) and each.fragment not in reductions
        )
        ranks.append(Schedule(row, {}, (), (), Signature((), ()), buffers, tuple(spans)))
    actions = {str(action): action for action in expansion.place}
    transfers = {name: each for each, name in names.items()}
    return ScheduleProgram(Mesh(((AXIS, schedule.num_ranks),)), schedule, tuple(ranks), {**actions, **reductions}, transfers)


def stage_edges(program: ScheduleProgram) -> tuple[Edge, ...]:
    """Which stage feeds which, told by the transfers; in the order that `expand` was given."""
    found: dict[tuple[int, int], bool] = {}
    for source, target, direction, _ in program.transfers.values():
        pair = (min(source, target), max(source, target))
        found[pair] = found.get(pair, False) or direction == "B"
    return tuple(Edge(*pair, has_gradient) for pair, has_gradient in found.items())


def sends_of(action: Action, edges: Iterable[Edge]) -> Iterator[Transfer]:
    """What `action` makes for other stages."""
    if action.kind == "F":
        yield from (Transfer(action.stage, edge.target, "F", action.microbatch) for edge in edges if edge.source == action.stage)
    elif action.kind != "W":
        for edge in edges:
            if edge.target == action.stage and edge.has_gradient:
                yield Transfer(action.stage, edge.source, "B", action.microbatch)


def receives_of(action: Action, edges: Iterable[Edge]) -> Iterator[Transfer]:
    """What `action` reads from other stages."""
    if action.kind == "F":
        yield from (Transfer(edge.source, action.stage, "F", action.microbatch) for edge in edges if edge.target == action.stage)
    elif action.kind != "W":
        for edge in edges:
            if edge.source == action.stage and edge.has_gradient:
                yield Transfer(edge.target, action.stage, "B", action.microbatch)


def saved_by(stage: int, microbatch: int) -> tuple[str, str]:
    """The buffers that a forward keeps: until the gradients of the stage's inputs are computed, and until those of its weights."""
    return f"{stage}F{microbatch}.I", f"{stage}F{microbatch}.W"


def run_of(action: Action, read: Iterable[str], made: Iterable[str]) -> Run:
    """An action as a whole; what it reads from other stages and makes for them comes beside what its stage saves."""
    saved = saved_by(action.stage, action.microbatch)
    if action.kind == "F":
        return Run(str(action), tuple(read), (*made, *saved))
    return Run(str(action), (*read, *(saved[1:] if action.kind == "W" else saved)), tuple(made))


def _transfers(schedule: PipelineSchedule, edges: Iterable[Edge]) -> Iterator[Transfer]:
    """All that goes from stage to stage, whatever the orders forget."""
    for source, target, has_gradient in edges:
        for microbatch in range(schedule.num_microbatches):
            yield Transfer(source, target, "F", microbatch)
            if has_gradient:
                yield Transfer(target, source, "B", microbatch)


def _buffer(transfer: Transfer) -> Buffer:
    return Buffer(f"{transfer.source}{transfer.direction}>{transfer.target}", microbatch=transfer.microbatch)


def _saved_buffers(schedule: PipelineSchedule) -> dict[str, Buffer]:
    found: dict[str, Buffer] = {}
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            found |= dict.fromkeys(saved_by(stage, microbatch), Buffer(f"{stage}F", None, microbatch, "saved"))
    return found


class _Expansion:
    """`names` are those of all transfers that the pipeline has."""

    def __init__(self, schedule: PipelineSchedule, edges: Sequence[Edge], names: Mapping[Transfer, str]) -> None:
        self.schedule, self.names = schedule, names
        self.by_stage: dict[int, list[Edge]] = defaultdict(list)
        for edge in edges:
            self.by_stage[edge.source].append(edge)
            self.by_stage[edge.target].append(edge)
        self.place = {action: (rank, index) for rank, order in enumerate(schedule.orders) for index, action in enumerate(order)}
        self.kinds = backward_kinds(schedule.orders)
        self.known = self._known()
        # By action, what it gives to other stages and takes from them, on whatever ranks.
        self.made = {each: [one for one in sends_of(each, self.by_stage[each.stage]) if one in names] for each in self.place}
        self.read = {each: [one for one in receives_of(each, self.by_stage[each.stage]) if one in names] for each in self.place}

    def holder(self, stage: int) -> int:
        return self.schedule.stages[stage] if stage < self.schedule.num_stages else -1

    def outgoing(self, rank: int, action: Action) -> list[Transfer]:
        """What goes to other ranks."""
        return [each for each in self.made[action] if self.holder(each.target) != rank]

    def incoming(self, rank: int, action: Action) -> list[Transfer]:
        """What comes from other ranks."""
        return [each for each in self.read[action] if self.holder(each.source) != rank]

    def rank(self, rank: int, prefetch: int) -> tuple[Instruction, ...]:
        order, names = self.schedule.orders[rank], self.names
        receives = self._receive_positions(rank, prefetch)
        last = {action.stage: position for position, action in enumerate(order) if action.kind in ("B", "W")}
        pending: list[tuple[Transfer, _Position | None]] = []
        row: list[Instruction] = []
        for position, action in enumerate(order):
            for each in receives.get(position, ()):
                row.append(Receive(names[each], AXIS, self.holder(each.source), (names[each],)))
            row += [Wait(names[each]) for each in self.incoming(rank, action)]
            known = self.known.get((rank, position))
            if known is not None:
                row += [Wait(names[each]) for each, reader in pending if reader and known[reader[0]] > reader[1]]
                pending = [(each, reader) for each, reader in pending if not (reader and known[reader[0]] > reader[1])]
            read, made = ([names[each] for each in of[action]] for of in (self.read, self.made))
            row.append(run_of(action, read, made))
            for each in self.outgoing(rank, action):
                row.append(Send(names[each], AXIS, self.holder(each.target), (names[each],)))
                pending.append((each, self._reader(each)))
            if last.get(action.stage) == position:
                row.append(Run(str(Reduction(action.stage)), (), ()))
        return (*row, *(Wait(names[each]) for each, _ in pending))

    def _receive_positions(self, rank: int, prefetch: int) -> dict[int, list[Transfer]]:
        """Before which action of `rank` each of its receives is launched, in the order of the senders' sends."""
        wanted: dict[int, dict[Transfer, int]] = defaultdict(dict)
        for position, action in enumerate(self.schedule.orders[rank]):
            for each in self.incoming(rank, action):
                wanted[self.holder(each.source)].setdefault(each, max(position - prefetch, 0))
        positions: dict[int, list[Transfer]] = defaultdict(list)
        for peer, transfers in wanted.items():
            sent = dict.fromkeys(each for each in self._sent(peer, rank) if each in transfers)
            queue = [*sent, *(each for each in transfers if each not in sent)]
            soonest = len(self.schedule.orders[rank])
            launches: list[tuple[int, Transfer]] = []
            for each in reversed(queue):
                soonest = min(soonest, transfers[each])
                launches.append((soonest, each))
            for position, each in reversed(launches):
                positions[position].append(each)
        return positions

    def _sent(self, source: int, target: int) -> Iterator[Transfer]:
        """What `source` sends to `target`, in its order."""
        if 0 <= source < self.schedule.num_ranks:
            for action in self.schedule.orders[source]:
                yield from (each for each in self.made[action] if self.holder(each.target) == target != source)

    def _reader(self, transfer: Transfer) -> _Position | None:
        kind = "F" if transfer.direction == "F" else self.kinds.get((transfer.target, transfer.microbatch), "I")
        return self.place.get(Action(transfer.target, kind, transfer.microbatch))

    def _known(self) -> dict[_Position, list[int]]:
        """For each action, how many actions of every rank are certainly over when it starts. Actions caught in a cycle are left out."""
        known: dict[_Position, list[int]] = {}
        rows = dict(enumerate(self.schedule.orders))
        at = dict.fromkeys(rows, 0)

        def start(rank: int, action: Action) -> bool:
            places = self._needed(action)
            if not all(place in known for place in places):
                return False
            known[rank, at[rank]] = self._after(rank, at[rank], places, known)
            return True

        take_turns(rows, start, at)
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
