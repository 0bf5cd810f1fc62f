"""Says where each result of the step lies, and sends losses, outputs and changed buffers to the ranks that lack them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from autopar.graph.fragments import buffer_of
from autopar.ir.instructions import Instruction, Receive, Send
from autopar.ir.lifetimes import touched
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Output
from autopar.ir.schedule import Schedule
from autopar.pipeline.buffer_names import BufferNames
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.stage_cut import StageCut
from autopar.pipeline.stage_rules import stage_of
from autopar.pipeline.stage_work import Work
from autopar.pipeline.step_end import completed


@dataclass(frozen=True)
class HandOut:
    """Send what the caller gets, and the new values of the model's buffers, to the ranks along `pp` that lack them.

    Reads: a `ScheduleProgram` in which all sums are complete. Writes: transfers at the end, of the inputs those that each rank
    reads, its outputs.
    Ensures: losses, outputs, checks and buffers are on every rank, gradients where the stages are that hold their parameters.
    """

    name: str = "hand out"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        names = BufferNames.of(program)
        results = _Results(program, names)
        has = [_touched(schedule) for schedule in program.places]
        places = []
        for place, schedule in enumerate(program.places):
            places.append(results.named(schedule.appended(results.shared(place, has)), place))
        return program.with_places(places, buffers=names.table)


@dataclass(frozen=True)
class _Results:
    program: ScheduleProgram
    names: BufferNames

    @property
    def cut(self) -> StageCut:
        return self.names.cut

    def owners(self, output: Output, node: Node) -> tuple[int, ...]:
        """The stages that hold a result."""
        found = next((each.stages for each in self.cut.sums if each.output is output), None)
        if found is None and node.op == "placeholder":  # a gradient that is the tangent itself
            found = tuple(sorted(Work(self.cut.program).holding(output)))
        return found or (stage_of(node),)

    def buffers(self, output: Output, node: Node) -> tuple[str, ...]:
        """The buffers that a result is left in, one a microbatch where it is split over them."""
        name, number = buffer_of(node), self.program.order.num_microbatches
        if output.kind == "buffer":
            return (self.names.of_microbatch(number - 1)(name),)
        found = next((each for each in self.cut.sums if each.output is output), None)
        if found is not None:
            return (self.names.of_step(name) if found.after else self.names.sum(name),)
        is_split = output.sharding is not None and MICROBATCHES in output.sharding.axes
        # What one microbatch violates, the others need not.
        numbers = range(number) if is_split or output.kind == "check" else range(number - 1, number)
        return tuple(dict.fromkeys(self.names.of_microbatch(each)(name) for each in numbers))

    def shared(self, place: int, has: Sequence[Set[str]]) -> list[Instruction]:
        """What the ranks at `place` send and receive so that all have the results. `has` are the buffers that those at each place
        have by then: a hidden state that the next stage reads has come there already."""
        missing: dict[tuple[int, int], list[str]] = {}
        places = set(range(len(has)))
        for output, node in self.cut.program.named_outputs():
            for name in self.buffers(output, node) if output.kind != "gradient" else ():
                having = {each for each in places if self._is_ready(output) and name in has[each]}
                having |= places if node in self._fed_everywhere else set()
                owner = self.program.order.stages[self.owners(output, node)[0]]
                owner = owner if owner in having else min(having, default=owner)
                for peer in places - having - {owner}:
                    missing.setdefault((owner, peer), []).append(name)
        found: list[Instruction] = []
        for (owner, peer), several in sorted(missing.items()):
            buffers = tuple(dict.fromkeys(several))
            if owner == place:
                found.append(Send(f"results_{owner}>{peer}", "pp", peer, buffers))
            elif peer == place:
                found.append(Receive(f"results_{owner}>{peer}", "pp", owner, buffers))
        return completed(found)

    def _is_ready(self, output: Output) -> bool:
        """Whether a result is whole wherever a buffer of its name is: no sum, of which a stage may have its addend."""
        return output.kind != "buffer" and all(each.output is not output for each in self.cut.sums)

    @cached_property
    def _fed_everywhere(self) -> frozenset[Node]:
        """The inputs that every rank is given where it has use for them."""
        return frozenset(node for item, node in self.cut.program.named_inputs() if item.kind != "parameter")

    def named(self, schedule: Schedule, place: int) -> Schedule:
        """With its inputs and outputs: what it reads and nobody brings, and the results that are there at the end."""
        program, stages = self.cut.program, set(self.program.stages_of(place))
        outputs = [
            (output, name)
            for output, node in program.named_outputs()
            if output.kind != "gradient" or stages.intersection(self.owners(output, node))
            for name in self.buffers(output, node)
        ]
        read = _touched(schedule) | {name for _, name in outputs}
        brought = {name for each in schedule.instructions if isinstance(each, Receive) for name in each.buffers}
        # What forward reads of a parameter it may overwrite: it is there to be updated by its gradient, of zeros.
        trained = {output.name for output, _ in outputs if output.kind == "gradient"}
        read |= {name for item, name in self.names.inputs if item.kind == "parameter" and item.name in trained}
        inputs = [(item, name) for item, name in self.names.inputs if name in read - brought]
        signature = replace(program.signature, inputs=tuple(item for item, _ in inputs), outputs=tuple(output for output, _ in outputs))
        return replace(schedule, inputs=tuple(name for _, name in inputs), outputs=tuple(name for _, name in outputs), signature=signature)


def _touched(schedule: Schedule) -> frozenset[str]:
    return frozenset(name for instruction in schedule.instructions for name in touched(instruction))
