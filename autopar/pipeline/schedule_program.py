"""The last form of a program: the instructions of every rank for one training step.

Passes of `passes/schedule/` write it, first whole actions at a time, then the fragments, collectives and transfers of each:

    RECV 0F2>1 pp=0 (0F2>1)                    what stage 0's forward of microbatch 2 makes for stage 1, from the rank at pp = 0
    WAIT 0F2>1
    RUN 1F2 (0F2>1) -> (1F2>2, 1F2.I, 1F2.W)   the forward of stage 1 on microbatch 2, and what it keeps for the backward
    SEND 1F2>2 pp=2 (1F2>2)
    RUN 1REDUCE_GRAD () -> ()                  the gradients of stage 1 are complete but for the sum over the replicas
    PAUSE                                      hand the outputs to the caller

One microbatch through one stage is the shortest pipeline: RUN 0F0, PAUSE, RUN 0B0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.actions import Action, PipelineSchedule, Reduction, Transfer
from autopar.ir.instructions import Instruction, Run
from autopar.ir.mesh import Mesh
from autopar.ir.schedule import Buffer, Fragment, Schedule
from autopar.pipeline.stage_cut import StageCut


@dataclass(frozen=True)
class ScheduleProgram:
    """The instructions of the ranks at every place along `pp`. Passes never change one that they were given: they return another.

    mesh           the ranks
    order          which stage runs which microbatch when
    places         what the ranks at each place along `pp` execute; all that share a place run the same
    actions        what RUN means before actions are written out, by the name that it gives
    transfers      what goes from stage to stage, by the name of its SEND and RECV; between stages of one rank it has none
    cut            the LOCAL program in pieces: what each action computes, what is summed and sent; None of a grid without a graph
    device         the type of device that fragments create tensors on ("cuda": the current one)
    is_executable  whether ranks can run it: results have their places, and buffers are freed
    """

    mesh: Mesh
    order: PipelineSchedule
    places: tuple[Schedule, ...]
    actions: Mapping[str, Action | Reduction] = field(default_factory=dict[str, Action | Reduction])
    transfers: Mapping[str, Transfer] = field(default_factory=dict[str, Transfer])
    cut: StageCut | None = None
    device: str = "cpu"
    is_executable: bool = False

    def __str__(self) -> str:
        blocks = [
            "\n".join([f"pp = {place}", *(f"    {each}" for each in schedule.instructions)]) for place, schedule in enumerate(self.places)
        ]
        return "\n".join(blocks)

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """What each name stands for, at whatever place."""
        return self.places[0].buffers

    @property
    def fragments(self) -> Mapping[str, Fragment]:
        return self.places[0].fragments

    @property
    def has_whole_actions(self) -> bool:
        """Whether some action of the pipeline is not written out yet; of a grid none ever is."""
        return any(isinstance(each, Action) for each in self.actions.values()) or (self.cut is None and not self.is_executable)

    @property
    def num_instructions(self) -> int:
        return sum(len(schedule.instructions) for schedule in self.places)

    def schedule_of(self, rank: int) -> Schedule:
        """What a rank of the mesh executes."""
        return self.places[self.place_of(rank)]

    def place_of(self, rank: int) -> int:
        """Where along `pp` a rank of the mesh is."""
        return self.mesh.index(rank, self.mesh.parts("pp"))

    def first_at(self, place: int) -> int:
        """The first rank of the mesh at a place along `pp`: errors name it for all that are there."""
        return next(rank for rank in range(self.mesh.size) if self.place_of(rank) == place)

    def stages_of(self, place: int) -> list[int]:
        """The stages that the ranks at a place along `pp` hold."""
        return [stage for stage, holder in enumerate(self.order.stages) if holder == place]

    def action_of(self, instruction: Instruction) -> Action | Reduction | None:
        """What an instruction stands for that is not written out yet."""
        return self.actions.get(instruction.fragment) if isinstance(instruction, Run) else None

    def with_places(
        self,
        places: Iterable[Schedule],
        *,
        fragments: Mapping[str, Fragment] | None = None,
        buffers: Mapping[str, Buffer] | None = None,
        actions: Mapping[str, Action | Reduction] | None = None,
    ) -> ScheduleProgram:
        """With other schedules, which share one table of fragments and one of buffers; what is not given stays as it is."""
        fragments = self.fragments if fragments is None else fragments
        buffers = self.buffers if buffers is None else buffers
        rows = tuple(replace(each, fragments=fragments, buffers=buffers) for each in places)
        return replace(self, places=rows, actions=self.actions if actions is None else actions)

    def rewritten(self, write: Callable[[int, Instruction], Sequence[Instruction]]) -> ScheduleProgram:
        """With every instruction replaced by what `write` makes of it at its place along `pp`."""
        return self.with_places(each.regrouped([write(place, one) for one in each.instructions]) for place, each in enumerate(self.places))
