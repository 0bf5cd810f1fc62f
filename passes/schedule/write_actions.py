"""Whole actions become the fragments, collectives and transfers that they are made of.

RUN f0 (input_ids@2, w) -> (h@2)     a value of microbatch 2; what has no @ there is one of in a step
SEND 0F2>1 pp=1 (h@2)                what stage 0's forward of microbatch 2 made for stage 1
ADD w_grad.sum (w_grad@2)            a gradient so far
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from autopar.graph.fragments import FragmentCutter, buffer_of, waits_for
from autopar.ir.actions import Action, Kind, Reduction, Transfer
from autopar.ir.instructions import Add, Instruction, Pause, Receive, Run, Send, Wait
from autopar.ir.schedule import Schedule
from autopar.pipeline.buffer_names import BufferNames, Rename, renamed
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_cut import StageCut
from autopar.pipeline.step_end import all_waits, once_a_step


@dataclass(frozen=True)
class WriteActions:
    """Write out what each action computes for its microbatch, what it adds to sums, and what stages send.

    Copies of parameters, and what the network reads of sums over the microbatches, are computed ahead of the first action. A
    collective is waited for just before its first reader, be that in a later action of its microbatch.

    Every rank has all inputs: which of them it reads is known when all is written.

    frees_early  cut the backward where it has read much for the last time, so that it is freed there

    Reads: a `ScheduleProgram` of actions. Writes: fragments, collectives, sums, the buffers of transfers, spans, inputs.
    Ensures: no action is left but the reductions of gradients; nothing is under way at the end of a rank.
    """

    frees_early: bool = False
    name: str = "write actions"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        assert program.cut is not None, "a grid has no values"
        # The buffers of whole actions are gone with these.
        names = BufferNames(program.cut, program.order.num_microbatches)
        cutter = FragmentCutter(program.device, program.fragments, self.frees_early)
        transfers = _Transfers(program)
        places = [_Writer(program, place, names, cutter, transfers).schedule() for place in range(len(program.places))]
        actions = {name: each for name, each in program.actions.items() if isinstance(each, Reduction)}
        return program.with_places(places, actions=actions, fragments=cutter.fragments, buffers=names.table)


@dataclass
class _Writer:
    """Writes one rank."""

    program: ScheduleProgram
    place: int
    names: BufferNames
    cutter: FragmentCutter
    transfers: _Transfers
    # By microbatch the collectives that nobody waited for yet.
    under_way: dict[int, set[Node]] = field(default_factory=dict[int, set[Node]])
    # What a section of calls becomes, by what is under way before it, with what is then, and what it leaves for the end: alike for all
    # microbatches.
    sections: dict[object, tuple[tuple[Instruction, ...], frozenset[Node], tuple[Node, ...]]] = field(default_factory=dict)
    # By microbatch what only the caller reads of its forward, behind collectives: no microbatch waits for them.
    late: dict[int, list[Node]] = field(default_factory=dict[int, list[Node]])

    @property
    def cut(self) -> StageCut:
        assert self.program.cut is not None
        return self.program.cut

    def schedule(self) -> Schedule:
        schedule = self.program.places[self.place]
        groups = [self.written(each) for each in schedule.instructions]
        ahead = [instruction for stage in self.program.stages_of(self.place) for instruction in self.ahead(stage)]
        signature = replace(schedule.signature, inputs=tuple(item for item, _ in self.names.inputs))
        schedule = replace(schedule, inputs=tuple(name for _, name in self.names.inputs), signature=signature)
        return schedule.regrouped(groups).prepended(ahead).appended(self.finished())

    def written(self, instruction: Instruction) -> list[Instruction]:
        action = self.program.action_of(instruction)
        if isinstance(action, Action):
            return self.compute(action)
        if isinstance(instruction, (Send, Receive)):
            return self.transfer(instruction)
        if isinstance(instruction, Wait):
            return [instruction] if self.transfers.values(self.program.transfers[instruction.target]) else []
        return [*self.handed_out(), instruction] if isinstance(instruction, Pause) else [instruction]

    def ahead(self, stage: int) -> list[Instruction]:
        """Copies of parameters; what the network reads of sums over all microbatches, and what follows from these alone."""
        found = once_a_step(self.cut.copies[stage], self.cutter, self.names)
        for number in range(self.program.order.num_microbatches):
            rename, under_way = self.names.of_microbatch(number), set[Node]()
            found += renamed(self.cutter.section(self.cut.ahead[stage], under_way), rename)
            found += renamed(all_waits(under_way), rename)
            found += [Add(self.names.count(total.name), rename(buffer_of(source))) for source, total in self.cut.counts[stage]]
        return [*found, *once_a_step(self.cut.from_counts[stage], self.cutter, self.names)]

    def compute(self, action: Action) -> list[Instruction]:
        stage, kind, number = action
        rename, nodes = self.names.of_microbatch(number), self.cut.actions[stage, kind]
        under_way = self.under_way.setdefault(number, set())
        instructions, late = self.section(stage, kind, nodes, under_way)
        self.late.setdefault(number, []).extend(late)
        made = set(nodes).difference(late)
        parts = [part for part in self.parts if part in made]
        waits = waits_for([*parts, *(node for node in self.carried if node in made)], under_way)
        return _with_adds(renamed([*instructions, *waits], rename), self.adds(parts, rename))

    def section(
        self, stage: int, kind: Kind, nodes: tuple[Node, ...], under_way: set[Node]
    ) -> tuple[Sequence[Instruction], Sequence[Node]]:
        """The instructions of a section, and what it leaves for the end of the rank."""
        key = stage, kind, frozenset(under_way)
        if key not in self.sections:
            after = set(under_way)
            # What is summed up in the backward goes to nothing but its sum; where memory is short it goes there at once.
            summed = frozenset(self.parts) if kind != "F" and not self.cutter.frees_early else frozenset[Node]()
            instructions, late = self.cutter.section_without_late(nodes, after, summed)
            # A gradient is not held until the end of the rank, nor has the next microbatch the time.
            if kind != "F" or self.program.order.is_single or set(self.carried).intersection(late):
                instructions, late = (*instructions, *self.cutter.late(late, after)), ()
            self.sections[key] = instructions, frozenset(after), late
        instructions, after, late = self.sections[key]
        under_way.clear()
        under_way.update(after)
        return instructions, late

    @cached_property
    def parts(self) -> tuple[Node, ...]:
        """What is added up over the microbatches."""
        return tuple(dict.fromkeys(part for each in self.cut.sums for part in each.parts))

    def adds(self, parts: Iterable[Node], rename: Rename) -> list[Add]:
        return [Add(self.names.sum(buffer_of(part)), rename(buffer_of(part))) for part in parts]

    @property
    def carried(self) -> list[Node]:
        """The new values of the model's buffers, which the next microbatch starts from."""
        return [node for output, node in self.cut.program.named_outputs() if output.kind == "buffer"]

    def transfer(self, instruction: Send | Receive) -> list[Instruction]:
        transfer = self.program.transfers[instruction.transfer]
        rename, values = self.names.of_microbatch(transfer.microbatch), self.transfers.values(transfer)
        if not values:
            return []
        waits = waits_for(values, self.under_way[transfer.microbatch]) if isinstance(instruction, Send) else []
        return [*renamed(waits, rename), replace(instruction, buffers=tuple(rename(buffer_of(value)) for value in values))]

    def handed_out(self) -> list[Instruction]:
        """WAITs for what the caller gets at PAUSE."""
        results = [node for output, node in self.cut.program.named_outputs() if output.kind != "gradient"]
        return self.waited(results)

    def finished(self) -> list[Instruction]:
        """What was left for the end, and WAITs for all that is still under way, the results first."""
        found: list[Instruction] = []
        for number, late in self.late.items():
            rename = self.names.of_microbatch(number)
            found += renamed(self.cutter.late(late, self.under_way[number]), rename)
            found += self.adds([part for part in self.parts if part in late], rename)
        found += self.waited(self.cut.program.results)
        for number, under_way in self.under_way.items():
            found += renamed(all_waits(under_way), self.names.of_microbatch(number))
        return found

    def waited(self, values: Iterable[Node]) -> list[Instruction]:
        values = list(values)
        found: list[Instruction] = []
        for number, under_way in self.under_way.items():
            found += renamed(waits_for(values, under_way), self.names.of_microbatch(number))
        return found


def _with_adds(instructions: Iterable[Instruction], adds: Iterable[Add]) -> list[Instruction]:
    """Each ADD behind the instruction that completes what it adds, so that what is final may be reduced and what is added be freed."""
    waiting = {each.source: each for each in adds}
    found: list[Instruction] = []
    for each in instructions:
        made = each.outputs if isinstance(each, Run) else (each.target,) if isinstance(each, Wait) else ()
        found += [each, *(waiting.pop(name) for name in made if name in waiting)]
    return [*found, *waiting.values()]


class _Transfers:
    """What each transfer brings."""

    def __init__(self, program: ScheduleProgram) -> None:
        self.program = program
        # By rank, where its actions stand.
        self.positions = [
            {action: position for position, each in enumerate(schedule.instructions) if (action := program.action_of(each))}
            for schedule in program.places
        ]
        self.found: dict[Transfer, list[Node]] = {}

    def values(self, transfer: Transfer) -> list[Node]:
        """Its values, less what an earlier one brings: one rank may hold several stages that read a value."""
        if transfer not in self.found:
            self.found[transfer] = self._values(transfer)
        return self.found[transfer]

    def _values(self, transfer: Transfer) -> list[Node]:
        assert self.program.cut is not None
        holders = self.program.order.stages
        rank = holders[transfer.target]
        to_rank = {
            Transfer(source, target, direction, transfer.microbatch): values
            for (source, target, direction), values in self.program.cut.transfers.items()
            if source == transfer.source and holders[target] == rank
        }
        before = [each for each in to_rank if self._read_at(rank, each) < self._read_at(rank, transfer)]
        return [value for value in to_rank.get(transfer, ()) if not any(value in to_rank[each] for each in before)]

    def _read_at(self, rank: int, transfer: Transfer) -> int:
        """Where among its instructions `rank` reads what `transfer` brings."""
        return next(self.positions[rank][action] for action in transfer.readers if action in self.positions[rank])
