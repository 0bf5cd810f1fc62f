"""What a compile yields: every form of the program, the decisions, and the schedule that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.remade import Remade
from autopar.ir.actions import PipelineSchedule
from autopar.ir.offload import Offload
from autopar.ir.program import Form, Program
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
class Compiled:
    """One captured call, compiled. Shared by the runtime, which runs `schedule`, and by inspection, which reads the rest.

    forward   FORWARD, after the forward passes
    program   GLOBAL, every node with its sharding, and its stage where there are stages
    local     LOCAL, one rank's program
    separated LOCAL, each microbatch with its own estimate of what several mix; None where nothing does
    schedule  what every rank executes
    plan      the decisions with their reasons
    steps     every pass that ran on a graph, in order; schedule_steps: those on the schedule, after them
    search    the result of the sharding search; None where a plan fixed every decision
    cost      what priced it
    decide_again  `pins -> (program, plan)`: the search with other pins, from the program before them on
    keyed     a FORWARD program of `steps` with its draws keyed as those of `forward` are
    updating  the schedule of `train_step`, with its updates; None where there is no optimizer, or nothing to update
    stages    where the forward is cut, and what each stage takes; None where one microbatch runs through one stage
    budget    what a rank may hold, and whose optimizer state is counted
    offload   what was asked to lie elsewhere than on the device
    """

    forward: Program
    program: Program
    local: Program
    schedule: ScheduleProgram
    plan: Plan | None = None
    steps: tuple[PassRun, ...] = ()
    search: ShardingDecision | None = None
    cost: CostModel | None = None
    decide_again: DecideAgain | None = None
    separated: Program | None = None
    keyed: Callable[[Program], Program] | None = None
    stages: StageDecision | None = None
    updating: ScheduleProgram | None = None
    schedule_steps: tuple[SchedulePassRun, ...] = ()
    budget: MemoryBudget = MemoryBudget()
    offload: Offload | None = None

    def within(self, budget: MemoryBudget) -> Compiled:
        """The same, of which `budget` was asked for."""
        search = self.search and replace(self.search, limit_bytes=budget.capacity_bytes * self.search.num_places)
        return replace(self, budget=budget, search=search)

    @property
    def counted_bytes(self) -> float:
        """What a rank takes by those who decide, who do not count all; infinite where none did."""
        decisions = (step.decision for step in self.steps)
        return next((each.peak_bytes for each in decisions if isinstance(each, RecomputeDecision)), math.inf)

    @property
    def order(self) -> PipelineSchedule:
        """Which stage runs which microbatch when."""
        return self.schedule.order

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """What ranks execute, by their place on `pp`; one where there is no such axis."""
        return self.schedule.places

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """By parameter the stages that read it; none without a pipeline."""
        return {} if self.stages is None else holders_of(self.program)

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
