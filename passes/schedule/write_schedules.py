"""What every rank of a pipeline executes: its actions in order, each the instructions of one stage for one microbatch.

RUN f0 (input_ids@2, w) -> (h@2)     a value of microbatch 2; what has no @ there is one of a step
SEND 0F2>1 pp=1 (h@2)                what stage 0's forward of microbatch 2 made for stage 1
ADD w_grad.sum (w_grad@2)            a gradient so far
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.fx import Node

from autopar.ir.keys import STAGE
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Input, Output, Program
from autopar.ir.schedule import Add, Instruction, Launch, Receive, Run, Schedule, Send, Span, Wait
from autopar.passes.schedule.cut_fragments import FragmentCutter, buffer_of, shapes_of, touched, with_frees
from autopar.passes.schedule.cut_stages import Stages, Sum, cut_stages, differs
from autopar.pipeline import program as pipeline
from autopar.pipeline.actions import Action, PipelineSchedule
from autopar.pipeline.check import check_pipeline
from autopar.pipeline.expand import expand

AXIS = "pp"
Rename = Callable[[str], str]


def write_schedules(stages: Stages, order: pipeline.PipelineProgram, device: str = "cpu") -> tuple[Schedule, ...]:
    """The schedule of each rank along `pp`; fragments are shared. `device` is as for `cut_fragments`."""
    cutter = FragmentCutter(stages.program, torch.device(device))
    writers = [_Writer(stages, order, rank, cutter) for rank in range(len(order.ranks))]
    for writer in writers:
        writer.write()
    held = [writer.touched() for writer in writers]
    for writer in writers:
        writer.share(held)
    return tuple(writer.schedule() for writer in writers)


def pipeline_schedules(program: Program, order: PipelineSchedule, device: str) -> tuple[Schedule, ...]:
    """What the ranks along `pp` execute, proved to run to the end. Raises `ScheduleError` naming every fault of `order`."""
    stages = cut_stages(program, order.num_stages)
    return write_schedules(stages, _expanded(order, stages), device)


def _expanded(order: PipelineSchedule, stages: Stages) -> pipeline.PipelineProgram:
    """The instructions of all ranks; of a program without gradients its forwards alone."""
    if stages.program.signature.outputs_of("gradient"):
        return check_pipeline(order, edges=stages.edges)
    forwards = tuple(tuple(action for action in row if action.kind == "F") for row in order.orders)
    return expand(replace(order, orders=forwards), stages.edges)


@dataclass
class _Writer:
    stages: Stages
    order: pipeline.PipelineProgram
    rank: int
    cutter: FragmentCutter
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    finished: set[int] = field(default_factory=set[int])
    # What was done to sums so far: equal gradients of several parameters are one.
    moved: set[Node] = field(default_factory=set[Node])
    spans: list[Span] = field(default_factory=list[Span])

    # ---- names

    @cached_property
    def per_step(self) -> frozenset[str]:
        """The buffers of which there is one a step."""
        calls = {buffer_of(node) for node in self.stages.per_step}
        changing = self.per_microbatch_inputs | set(self.carried)
        return frozenset(calls | {node.name for node in self.stages.program.placeholders if node.name not in changing})

    @cached_property
    def per_microbatch_inputs(self) -> frozenset[str]:
        return frozenset(node.name for item, node in self.stages.program.named_inputs() if differs(item))

    @cached_property
    def carried(self) -> dict[str, str]:
        """The buffers that each microbatch finds as the one before left them, with where that is."""
        inputs = {item.name: node.name for item, node in self.stages.program.named_inputs() if item.kind == "buffer"}
        return {inputs[item.name]: buffer_of(node) for item, node in self.stages.program.named_outputs() if item.kind == "buffer"}

    def of_microbatch(self, number: int) -> Rename:
        def rename(name: str) -> str:
            if name in self.per_step:
                return name
            if name in self.carried:
                return f"{self.carried[name]}@{number - 1}" if number else name
            return f"{name}@{number}"

        return rename

    def of_step(self, name: str) -> str:
        return name if name in self.per_step else sum_of(name)

    # ---- what is written

    @property
    def mine(self) -> list[int]:
        return [stage for stage, rank in enumerate(self.order.stages) if rank == self.rank]

    @property
    def microbatches(self) -> range:
        return range(self.order.num_microbatches)

    def write(self) -> None:
        for stage in self.mine:
            self.ahead(stage)
        for instruction in self.order.ranks[self.rank]:
            if isinstance(instruction, pipeline.Compute):
                self.compute(instruction)
            elif isinstance(instruction, pipeline.ReduceGradients):
                self.reduce(instruction.stage)
            else:
                self.instructions += self.transport(instruction)
        for stage in self.mine:
            self.reduce(stage)
        self.tie()

    def ahead(self, stage: int) -> None:
        for number in self.microbatches:
            self.add(self.cutter.section(self.stages.ahead[stage]), self.of_microbatch(number))
            for source, total in self.stages.counted[stage]:
                self.instructions.append(Add(total.name, self.of_microbatch(number)(buffer_of(source))))
        self.add(self.cutter.section(self.stages.once[stage]), self.of_step)

    def compute(self, instruction: pipeline.Compute) -> None:
        stage, kind, number = instruction.action
        nodes = self.stages.actions[stage, kind]
        rename, begin = self.of_microbatch(number), len(self.instructions)
        self.add(self.cutter.section(nodes), rename)
        made = set(nodes)
        for part in dict.fromkeys(part for each in self.stages.sums for part in each.parts if part in made):
            self.instructions.append(Add(sum_of(buffer_of(part)), rename(buffer_of(part))))
        self.spans.append(Span(str(instruction.action), begin, len(self.instructions)))

    def reduce(self, stage: int) -> None:
        """Finish what this stage alone sums, once: after its last backward, or at the end where there is none."""
        if stage not in self.finished:
            self.finished.add(stage)
            self.finish(each for each in self.stages.sums if each.is_local and each.stages == (stage,))

    def finish(self, sums: Iterable[Sum]) -> None:
        after = {node for each in sums for node in each.after} - self.moved
        self.moved |= after
        ordered = [node for node in self.stages.program.graph.nodes if node in after]
        self.add(self.cutter.section(ordered), self.of_step)

    def transport(self, instruction: pipeline.Send | pipeline.Receive | pipeline.Wait) -> Iterator[Instruction]:
        launched = instruction.launched if isinstance(instruction, pipeline.Wait) else instruction
        source, target, direction, number = launched.transfer
        values = self.brought(launched.transfer)
        name = f"{source}{direction}{number}>{target}"
        if not values:
            return
        if isinstance(instruction, pipeline.Wait):
            yield Wait(name)
            return
        kind = Send if isinstance(instruction, pipeline.Send) else Receive
        yield kind(name, AXIS, launched.peer, tuple(self.of_microbatch(number)(buffer_of(value)) for value in values))

    def brought(self, transfer: pipeline.Transfer) -> list[Node]:
        """The values of a transfer, less what an earlier one brings: one rank may hold several stages that read a value."""
        rank = self.order.stages[transfer.target]
        to_rank = {
            pipeline.Transfer(source, target, direction, transfer.microbatch): values
            for (source, target, direction), values in self.stages.transfers.items()
            if source == transfer.source and self.order.stages[target] == rank
        }
        before = [each for each in to_rank if self.read_at(rank, each) < self.read_at(rank, transfer)]
        return [value for value in to_rank.get(transfer, ()) if not any(value in to_rank[each] for each in before)]

    def read_at(self, rank: int, transfer: pipeline.Transfer) -> int:
        """Where among its instructions `rank` reads what `transfer` brings."""
        return next(self.positions[rank][action] for action in transfer.readers if action in self.positions[rank])

    @cached_property
    def positions(self) -> tuple[dict[Action, int], ...]:
        """By rank, where its actions stand."""
        return tuple({each.action: i for i, each in enumerate(row) if isinstance(each, pipeline.Compute)} for row in self.order.ranks)

    def tie(self) -> None:
        """Exchange and add up the gradients of parameters that several stages hold, or another than the one that makes them."""
        ties = [each for each in self.stages.sums if not each.is_local]
        transfers: list[Instruction] = []
        for each in ties:
            wanting = sorted({self.order.stages[stage] for stage in each.stages})
            for part in each.parts:
                maker, buffers = self.order.stages[STAGE[part]], (sum_of(buffer_of(part)),)
                if maker == self.rank:
                    transfers += [Send(f"tied_{part.name}>{peer}", AXIS, peer, buffers) for peer in wanting if peer != maker]
                elif self.rank in wanting:
                    transfers.append(Receive(f"tied_{part.name}>{self.rank}", AXIS, maker, buffers))
        self.launch(list(dict.fromkeys(transfers)))  # equal gradients of several parameters are one
        ties = [each for each in ties if set(each.stages).intersection(self.mine)]
        pairs = dict.fromkeys((each.target, part) for each in ties for part in each.parts if part is not each.target)
        self.instructions += [Add(sum_of(buffer_of(target)), sum_of(buffer_of(part))) for target, part in pairs]
        self.finish(ties)

    def share(self, has: Sequence[Set[str]]) -> None:
        """What every rank has at the end: what the caller gets, and the buffers of the model, since all ranks hold all of them.

        `has` are the buffers that each rank has by then. A hidden state that the next stage reads has come there already.
        """
        held: dict[tuple[int, int], list[str]] = {}
        for output, node in self.stages.program.named_outputs():
            if output.kind == "gradient":
                continue
            for name in self.buffers(output, node):
                having = {rank for rank, names in enumerate(has) if self.is_ready(output) and name in names}
                having |= set(range(len(has))) if node in self.fed_everywhere else set()
                owner = self.order.stages[self.owners(output, node)[0]]
                owner = owner if owner in having else min(having, default=owner)
                for peer in set(range(len(has))) - having - {owner}:
                    held.setdefault((owner, peer), []).append(name)
        transfers: list[Instruction] = []
        for (owner, peer), names in sorted(held.items()):
            buffers = tuple(dict.fromkeys(names))
            if owner == self.rank:
                transfers.append(Send(f"results_{owner}>{peer}", AXIS, peer, buffers))
            elif peer == self.rank:
                transfers.append(Receive(f"results_{owner}>{peer}", AXIS, owner, buffers))
        self.launch(transfers)

    def is_ready(self, output: Output) -> bool:
        """Whether a result is whole wherever a buffer of its name is: no sum, of which a stage may have its addend."""
        return output.kind != "buffer" and all(each.output is not output for each in self.stages.sums)

    @cached_property
    def fed_everywhere(self) -> frozenset[Node]:
        """The inputs that every rank is given where it has use for them."""
        return frozenset(node for item, node in self.stages.program.named_inputs() if item.kind != "parameter")

    def touched(self) -> frozenset[str]:
        return frozenset(name for instruction in self.instructions for name in touched(instruction))

    def launch(self, transfers: list[Instruction]) -> None:
        self.instructions += transfers
        self.instructions += [Wait(each.transfer) for each in transfers if isinstance(each, (Send, Receive))]

    def add(self, section: Iterable[Instruction], rename: Rename) -> None:
        self.instructions += [_renamed(instruction, rename) for instruction in section]

    # ---- results

    def owners(self, output: Output, node: Node) -> tuple[int, ...]:
        """The stages that hold a result."""
        found = next((each.stages for each in self.stages.sums if each.output is output), None)
        return found or (STAGE.get(node) or 0,)

    def buffers(self, output: Output, node: Node) -> tuple[str, ...]:
        """The buffers that a result is left in, one a microbatch where it is split over them."""
        name = buffer_of(node)
        if output.kind == "buffer":
            return (self.of_microbatch(self.order.num_microbatches - 1)(name),)
        found = next((each for each in self.stages.sums if each.output is output), None)
        if found is not None:
            return (name if found.after else sum_of(name),)
        if name in self.per_step:
            return (name,)
        is_split = output.sharding is not None and MICROBATCHES in output.sharding.axes
        # What one microbatch violates, the others need not.
        numbers = self.microbatches if is_split or output.kind == "check" else self.microbatches[-1:]
        return tuple(self.of_microbatch(number)(name) for number in numbers)

    def schedule(self) -> Schedule:
        program, signature = self.stages.program, self.stages.program.signature
        outputs = [
            (output, name)
            for output, node in program.named_outputs()
            if output.kind != "gradient" or any(self.order.stages[stage] == self.rank for stage in self.owners(output, node))
            for name in self.buffers(output, node)
        ]
        read = self.touched() | {name for _, name in outputs}
        brought = {name for each in self.instructions if isinstance(each, Receive) for name in each.buffers}
        inputs = [(item, name) for item, node in program.named_inputs() for name in self.fed(item, node) if name in read - brought]
        shapes = shapes_of(program)
        shapes |= {sum_of(name): shape for name, shape in shapes.items()}
        instructions, places = with_frees(self.instructions, {name for _, name in (*inputs, *outputs)})
        return Schedule(
            instructions,
            self.cutter.fragments,
            tuple(name for _, name in inputs),
            tuple(name for _, name in outputs),
            replace(signature, inputs=tuple(item for item, _ in inputs), outputs=tuple(output for output, _ in outputs)),
            shapes,
            tuple(Span(each.action, places[each.begin], places[each.end]) for each in self.spans),
        )

    def fed(self, item: Input, node: Node) -> tuple[str, ...]:
        return tuple(f"{node.name}@{number}" for number in self.microbatches) if differs(item) else (node.name,)


def sum_of(name: str) -> str:
    """The buffer that adds up buffer `name` over the microbatches."""
    return f"{name}.sum"


def _renamed(instruction: Instruction, rename: Rename) -> Instruction:
    def all_of(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(rename, names))

    if isinstance(instruction, Run):
        return Run(instruction.fragment, all_of(instruction.inputs), all_of(instruction.outputs))
    if isinstance(instruction, Launch):
        return replace(instruction, source=rename(instruction.source), target=rename(instruction.target))
    assert isinstance(instruction, Wait), instruction
    return Wait(rename(instruction.target))
