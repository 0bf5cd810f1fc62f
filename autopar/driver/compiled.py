"""What a compile yields: every form of the program, the decisions, and the schedule that runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.remade import Remade
from autopar.ir.actions import PipelineSchedule
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Form, Program, Signature
from autopar.ir.schedule import Schedule
from autopar.pipeline.holders import holders_of
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.plans.decisions import ShardingDecision, StageDecision
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins
from autopar.recompute.decision import RecomputeDecision

# Pins as the user gives them → the program with its reshards and stages, and the plan that it follows.
DecideAgain = Callable[[UserPins | Plan | None], tuple[Program, Plan]]


class _TensorLeaf:
    """The type of `TENSOR`."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __copy__(self) -> _TensorLeaf:
        return self

    def __deepcopy__(self, memo: object) -> _TensorLeaf:
        return self


# Stands in `Signature.leaves` where the user's output has a tensor: None is a leaf that a model may return.
TENSOR: Final = _TensorLeaf()


@dataclass(frozen=True)
class PassRun:
    """One pass that ran: its place in the order, the program after it, what it decided (None for a plain rewrite), its class.

    `remake` does again what the pass did, and decides nothing.
    """

    number: int
    name: str
    seconds: float
    held: Program | Remade
    decision: object = None
    kind: type[object] | None = None
    remake: Callable[[Program], Program] | None = None

    @property
    def program(self) -> Program:
        """Made again where it is not held, which may take seconds; see `form` for what needs no program."""
        return self.held.program() if isinstance(self.held, Remade) else self.held

    @property
    def form(self) -> Form:
        return self.held.form


@dataclass(frozen=True)
class SchedulePassRun:
    """A pass that ran on a schedule: as a `PassRun`."""

    number: int
    name: str
    seconds: float
    program: ScheduleProgram
    decision: object = None
    kind: type[object] | None = None


@dataclass(frozen=True)
class Forms:
    """Every form of a program on its way, and what made them: what inspection reads, and no rank runs.

    forward   FORWARD, after the forward passes
    program   GLOBAL, every node with its sharding, and its stage where there are stages
    local     LOCAL, one rank's program
    separated LOCAL, each microbatch with its own estimate of what several mix; None where nothing does
    steps     every pass that ran on a graph, in order; schedule_steps: those on the schedule, after them
    search    the result of the sharding search; None where a plan fixed every decision
    cost      what priced it
    decide_again  `pins -> (program, plan)`: the search with other pins, from the program before them on
    keyed     a FORWARD program of `steps` with its draws keyed as those of `forward` are
    stages    where the forward is cut, and what each stage takes; None where one microbatch runs through one stage
    """

    forward: Program
    program: Program
    local: Program
    steps: tuple[PassRun, ...] = ()
    search: ShardingDecision | None = None
    cost: CostModel | None = None
    decide_again: DecideAgain | None = None
    separated: Program | None = None
    keyed: Callable[[Program], Program] | None = None
    stages: StageDecision | None = None
    schedule_steps: tuple[SchedulePassRun, ...] = ()


@dataclass(frozen=True)
class CallFacts:
    """What the runtime knows of a call besides its schedule: all of it can be written to bytes.

    signature, mesh, constants  those of the LOCAL program
    holders      by parameter the stages that read it; none without a pipeline
    written      the attributes of modules that forward sets, by path
    precision    by which the program was cast; `needs_scale`: whether a loss that is not scaled loses gradients
    """

    signature: Signature
    mesh: Mesh
    constants: Mapping[str, torch.Tensor]
    holders: Mapping[str, tuple[int, ...]]
    written: tuple[str, ...]
    precision: MixedPrecision | None
    needs_scale: bool

    @staticmethod
    def of(forms: Forms) -> CallFacts:
        local, forward = forms.local, forms.forward
        holders = {} if forms.stages is None else holders_of(forms.program)
        return CallFacts(local.signature, local.mesh, local.constants, holders, forward.written, forward.precision, forward.needs_scale)


@dataclass(frozen=True)
class Compiled:
    """One captured call, compiled. Shared by the runtime, which runs `schedule`, and by inspection, which reads its `forms`.

    schedule  what every rank executes
    facts     what else the runtime reads
    plan      the decisions with their reasons
    updating  the schedule of `train_step`, with its updates; None where there is no optimizer, or nothing to update
    budget    what a rank may hold, and whose optimizer state is counted
    offload   what was asked to lie elsewhere than on the device, or was found to be best there; `weighed` says why
    make_forms  gives the `forms`, which a process that has read its program makes when somebody asks for them
    """

    schedule: ScheduleProgram
    facts: CallFacts
    make_forms: Callable[[], Forms]
    plan: Plan | None = None
    updating: ScheduleProgram | None = None
    budget: MemoryBudget = MemoryBudget()
    offload: Offload | None = None
    weighed: str = ""

    @staticmethod
    def of(
        forward: Program,
        program: Program,
        local: Program,
        schedule: ScheduleProgram,
        plan: Plan | None = None,
        *,
        updating: ScheduleProgram | None = None,
        budget: MemoryBudget | None = None,
        offload: Offload | None = None,
        **others: Any,
    ) -> Compiled:
        """Of forms that are there; `others` are more of `Forms`."""
        forms = Forms(forward, program, local, **others)
        return Compiled(schedule, CallFacts.of(forms), lambda: forms, plan, updating, budget or MemoryBudget(), offload)

    @cached_property
    def forms(self) -> Forms:
        """Made again where this program was read, which takes seconds."""
        return self.make_forms()

    def with_forms(self, **changes: Any) -> Compiled:
        forms = replace(self.forms, **changes)
        return replace(self, facts=CallFacts.of(forms), make_forms=lambda: forms)

    def within(self, budget: MemoryBudget) -> Compiled:
        """The same, of which `budget` was asked for."""
        search = self.search and replace(self.search, limit_bytes=budget.capacity_bytes * self.search.num_places)
        return replace(self.with_forms(search=search), budget=budget)

    @property
    def signature(self) -> Signature:
        """That of the LOCAL program."""
        return self.facts.signature

    @property
    def mesh(self) -> Mesh:
        """That of the LOCAL program: ranks, and microbatches."""
        return self.facts.mesh

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        return self.facts.constants

    @property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """By parameter the stages that read it; none without a pipeline."""
        return self.facts.holders

    @property
    def forward(self) -> Program:
        return self.forms.forward

    @property
    def program(self) -> Program:
        return self.forms.program

    @property
    def local(self) -> Program:
        return self.forms.local

    @property
    def separated(self) -> Program | None:
        return self.forms.separated

    @property
    def steps(self) -> tuple[PassRun, ...]:
        return self.forms.steps

    @property
    def schedule_steps(self) -> tuple[SchedulePassRun, ...]:
        return self.forms.schedule_steps

    @property
    def search(self) -> ShardingDecision | None:
        return self.forms.search

    @property
    def cost(self) -> CostModel | None:
        return self.forms.cost

    @property
    def decide_again(self) -> DecideAgain | None:
        return self.forms.decide_again

    @property
    def keyed(self) -> Callable[[Program], Program] | None:
        return self.forms.keyed

    @property
    def stages(self) -> StageDecision | None:
        return self.forms.stages

    @property
    def counted_bytes(self) -> float:
        """What a rank takes by those who decide, who do not count all; infinite where none did."""
        decisions = (step.decision for step in self.steps)
        return next((each.peak_bytes for each in decisions if isinstance(each, RecomputeDecision)), math.inf)

    @property
    def recomputes_within(self) -> bool:
        """Whether what is computed again was chosen to fit into a budget, and thought to."""
        return any(isinstance(step.decision, RecomputeDecision) and step.decision.is_chosen for step in self.steps)

    @property
    def order(self) -> PipelineSchedule:
        """Which stage runs which microbatch when."""
        return self.schedule.order

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What ranks execute, by their place on `pp`; one where there is no such axis."""
        return self.schedule.places

    @cached_property
    def stored(self) -> frozenset[str]:
        """The parameters that lie elsewhere than on the device between their uses."""
        named = [(each, *pair) for each in self.schedules for pair in zip(each.signature.inputs, each.inputs, strict=True)]
        return frozenset(item.name for schedule, item, name in named if schedule.memory_of(name) != "device")

    @cached_property
    def computes_in_half(self) -> bool:
        """Whether something on a rank is in float16, where gradients of a loss that is not scaled may vanish."""
        return any(each.type is not None and each.type[1] is torch.float16 for each in self.schedule.buffers.values())

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they would run the same program."""
        more = self.updating.places if self.updating is not None else ()
        return "".join(schedule.fingerprint for schedule in (*self.schedules, *more))

    def schedule_of(self, rank: int) -> Schedule:
        return self.schedule.schedule_of(rank)
