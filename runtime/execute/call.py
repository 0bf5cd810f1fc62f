"""One call: the forward of a compiled program on all ranks of this process, and later its backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from autopar.driver.compiled import Compiled
from autopar.errors import BackwardError, ValueCheckError
from autopar.ir.instructions import Update
from autopar.ir.program import Input, Output
from autopar.ir.schedule import Schedule
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.runtime._torch import scale_in_place
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, Renewal, execute
from autopar.runtime.execute.owned_memory import OwnedMemory
from autopar.runtime.execute.places import Places, ResultPlace
from autopar.runtime.execute.transport import Transport
from autopar.runtime.execute.world import Parts, RankParts, World, local_of
from autopar.runtime.module.placement import widened
from autopar.runtime.module.tangents import is_known
from autopar.runtime.offload.copier import copier_of
from autopar.runtime.offload.stored import lying


class Meeting(Protocol):
    """Of all ranks, before a backward of the user's."""

    def begin(self, tangents: Mapping[str, torch.Tensor | None]) -> None:
        """Tell the others."""
        ...

    def end(self, tangents: Mapping[str, torch.Tensor | None]) -> bool:
        """Hear them: whether all have tangents of the same results, and those of one element, on the host, with the same value. Raises
        `InputError` on all where one is at something else, or begins from what it may not."""
        ...

    def is_over(self) -> None:
        """Backward has run."""
        ...


class Call:
    """Runs the schedules of this process's ranks up to PAUSE (`forward`) and to their end (`backward`), once each.

    Where all is over at PAUSE (`Schedule.is_over_at_pause`) the gradients are those of the loss itself, and `backward` scales them.

    tensors  parameters and buffers of the model by name
    batch    the leaves of the call by flat index
    key      what all random draws of this call descend from
    device   where coordinates and keys are made
    places   where inputs and results are, if that was found before
    program  the schedule to run, if not the plain one: with its updates
    scale    the gradient of the loss with which a backward starts that runs within the forward
    """

    def __init__(
        self,
        compiled: Compiled,
        fragments: CompiledFragments,
        world: World,
        tensors: Mapping[str, torch.Tensor],
        batch: Sequence[Any],
        key: int,
        device: torch.device,
        places: Places | None = None,
        program: ScheduleProgram | None = None,
        scale: float = 1.0,
    ) -> None:
        self.mesh, self.constants = compiled.mesh, compiled.constants
        self.signature = compiled.signature
        self.world, self._fragments, self._tensors = world, fragments, tensors
        self._batch, self.key, self._device = batch, key, device
        self._shapes: dict[str, torch.Size] = {}
        self.transports: tuple[Transport, ...] = world.transports(self.mesh.ranks)
        self.places, self._scale = places or Places(compiled, world.ranks), scale
        plain = self.places.schedules
        self.schedules: Mapping[int, Schedule] = plain if program is None else {rank: program.schedule_of(rank) for rank in plain}
        self.is_over_at_pause = any(schedule.is_over_at_pause for schedule in self.schedules.values())
        self._is_in_half = self.is_over_at_pause and compiled.computes_in_half
        self._stored = compiled.stored
        self.states: dict[int, RankState] = {rank: RankState({}) for rank in world.ranks}
        if compiled.offload is not None:
            for state in self.states.values():
                state.copier = copier_of(world, device, compiled.offload.folder)
        # Entered around each half while ranks run.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.meeting: Meeting | None = None
        self._is_begun = self._is_backward_begun = False
        if world.recorder is not None:
            for rank, state in self.states.items():
                state.record = world.recorder.call(self.schedules[rank])

    @property
    def hears_late(self) -> bool:
        """Whether it is known only at the end, after the backward, that the model's own checks hold."""
        return self.is_over_at_pause and bool(self.signature.outputs_of("check"))

    @property
    def has_backward(self) -> bool:
        return bool(self.signature.inputs_of("tangent"))

    @property
    def results(self) -> tuple[Output, ...]:
        """The outputs that the caller gets: the loss, or the user's output tensors."""
        return tuple(item for item in self.signature.outputs if item.kind in ("loss", "output"))

    @property
    def detached(self) -> tuple[Output, ...]:
        """Results through which no gradient comes back, although the model would let one."""
        return tuple(item for item in self.results if item.is_detached)

    @torch.no_grad()
    def begin(self) -> None:
        """Run what comes before the first instruction that anybody else hears of: a call that ends there never was."""
        self._fill_for_forward()
        self._run({rank: schedule.end_alone for rank, schedule in self.schedules.items()})
        self._is_begun = True

    def forward(self) -> dict[str, torch.Tensor]:
        """Run to PAUSE; the results by flat index. Buffers that the model changes are written back. Raises `ValueCheckError`."""
        if not self._is_begun:
            self._fill_for_forward()
        self._run()
        self._check_values()
        for item in self.signature.outputs_of("buffer"):
            held = self.held(item)
            if held.parts:
                local_of(self._tensors[item.name]).copy_(self.world.whole(*held))
        results = {item.name: self.world.whole(*self.held(item)) for item in self.results}
        self._shapes = {name: result.shape for name, result in results.items()}
        return results

    def whole_step(
        self, update: Callable[[int, Update, list[torch.Tensor]], None], renewal: Callable[[int, Update], Renewal] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run to the end, the gradient of the loss being `scale`; the results by flat index. Rank by rank `update` takes gradients, and
        `renewal` gives versions of what is updated."""
        for rank, state in self.states.items():
            state.update = partial(update, rank)
            state.renewal = None if renewal is None else partial(renewal, rank)
        results = self.forward()
        if not self.is_over_at_pause:
            self._fill(self.signature.inputs_of("tangent"))
            self._run()
        return results

    def version(self, rank: int, buffer: str, item: Input) -> torch.Tensor:
        """A copy of what `rank` would be given of a parameter now."""
        tensor = self._tensors[item.name]
        (held,) = self.world.as_they_are([tensor], [item])
        if held is None:
            place = next(place for place, its, name in self.places.of_input(item) if (its, name) == (rank, buffer))
            held = self.world.parameter_parts(tensor, item, self.mesh)[place]
        return held.clone(memory_format=torch.contiguous_format)

    def _check_values(self) -> None:
        """Raise `ValueCheckError` for what the model asserts of values, and does not hold."""
        checks = self.signature.outputs_of("check")
        if not checks:
            return
        # One look for all: on a GPU each would wait for it.
        violations = torch.stack([torch.stack(list(self.held(item).parts.values())).amax() for item in checks]).tolist()
        failed = [(text, count) for text, count in zip(self.signature.checks, violations, strict=True) if count]
        if failed:
            raise ValueCheckError("\n".join(f"{text}\n  violated by {count} values" if count > 1 else text for text, count in failed))

    def meet(self, tangents: Mapping[str, torch.Tensor | None]) -> bool:
        """What `Meeting.end` says, before a backward with these tangents. Meanwhile it begins as if all were equal; what it made is
        dropped where they are not."""
        if self.meeting is None:
            return False
        before = {rank: (dict(state.buffers), state.position) for rank, state in self.states.items()}
        are_equal = False
        try:
            self.meeting.begin(tangents)
            if self._may_begin_backward(tangents):
                self._put_tangents(tangents, are_equal=True)
                self._run({rank: schedule.end_alone_behind_pause for rank, schedule in self.schedules.items()})
                self._is_backward_begun = True
            are_equal = self.meeting.end(tangents)
        except BaseException:
            self.world.give_up()
            raise
        finally:
            if not are_equal:
                self._is_backward_begun = False
                for rank, state in self.states.items():
                    state.buffers, state.position = before[rank]
        return are_equal

    def _may_begin_backward(self, tangents: Mapping[str, torch.Tensor | None]) -> bool:
        """Whether nobody is asked for a tangent, and nothing looks at the run as a whole."""
        items = self.signature.inputs_of("tangent")
        is_alone = all(not item.shares and is_known(self._tangent(item, tangents[item.name])) for item in items)
        return self.world.is_expecting and not self.is_over_at_pause and self.around is nullcontext and is_alone

    def _put_tangents(self, tangents: Mapping[str, torch.Tensor | None], are_equal: bool) -> dict[str, Parts]:
        wholes = {item.name: self._tangent(item, tangents[item.name]) for item in self.signature.inputs_of("tangent")}
        given = {
            item.name: self.world.tangent_parts(wholes[item.name], item, self.mesh, are_equal and is_known(wholes[item.name]))
            for item in self.signature.inputs_of("tangent")
        }
        for item in self.signature.inputs_of("tangent") if not self.is_over_at_pause else ():
            self._put(item, given[item.name])
        return given

    def backward(self, tangents: Mapping[str, torch.Tensor | None], are_equal: bool = False) -> dict[str, torch.Tensor]:
        """Run from PAUSE to the end; gradients by the name of their parameter. `tangents` are by flat index of the result; `are_equal`
        is what `meet` said.

        A parameter that gradients reach only through results without a tangent has none.
        """
        reached = self._reached({name for name, tangent in tangents.items() if tangent is not None}, are_equal)
        given = {} if self._is_backward_begun else self._put_tangents(tangents, are_equal)
        self._run()
        owned = OwnedMemory(self.transports, (tensor for rank, state in self.states.items() for tensor in self._inputs_of(rank, state)))
        # All at once: there are hundreds, and a call for each takes longer than what is done with it.
        places = [(name, place) for name, place in self.places.gradients if name in reached]
        parameters = [self._tensors[name] for name, _ in places]
        held = [RankParts(self._parts_at(place), place.item, place.mesh) for _, place in places]
        gradients = self.world.gradients(held, parameters, owned.own)
        backwards = zip(reversed(places), reversed(parameters), strict=True)
        found = {name: widened(gradients.pop(), of) for (name, _), of in backwards}  # those in a lower dtype are let go of one by one
        if self.is_over_at_pause:
            (scale,) = (next(iter(parts.values())) for parts in given.values())
            self._check_scale(scale)
            scale_in_place([local_of(gradient) for gradient in found.values()], scale if self._scale == 1.0 else scale / self._scale)
        return found

    def _check_scale(self, scale: torch.Tensor) -> None:
        """Raise `BackwardError` where the loss was scaled for the sake of a backward in float16 that is over by then."""
        if self._is_in_half and self._scale == 1.0 and float(scale) > 1.0:
            raise BackwardError(
                f"the loss was multiplied by {float(scale):g}, but with pp > 1 or several microbatches the backward ran inside the call, "
                "in float16, from the loss as it was: gradients that vanished are not brought back. In place of torch.amp.GradScaler use "
                "parallel.scaler(), which says the scale before the call, or train_step with TrainStep(loss_scale=LossScale())"
            )

    def _reached(self, given: set[str], is_same: bool) -> set[str]:
        """The parameters whose gradients come back through one of the results that have a tangent, here or on another rank.

        Ranks must agree: a gradient of None on one of them would let its replicas drift apart. `is_same`: all have tangents of these.
        """
        through = self.places.through
        if through is None:
            return {name for name, _ in self.places.gradients} if given else set()
        anywhere = given if is_same else set().union(*self.world.gather(given))
        return {name for name, results in through.items() if anywhere.intersection(results)}

    def _tangent(self, item: Input, given: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(self._shapes[item.name], dtype=item.dtype, device=self._device) if given is None else given

    def held(self, item: Output) -> RankParts:
        """What the ranks of this process hold of a result or gradient, while this call is kept.

        In a pipeline that is by their places on the mesh of one stage, and by microbatch where they hold one of each.
        """
        found = self.places.of(item)
        return RankParts(self._parts_at(found), found.item, found.mesh)

    def _parts_at(self, found: ResultPlace) -> Parts:
        parts: Parts = {}
        for place, rank, name in found.buffers:
            if place not in parts:
                parts[place] = self.states[rank].buffers[name]
        return parts

    def _inputs_of(self, rank: int, state: RankState) -> list[torch.Tensor]:
        return [state.buffers[name] for name in self.schedules[rank].inputs if name in state.buffers]

    def _run(self, ends: Mapping[int, int] | None = None) -> None:
        """To PAUSE or the end, or before each rank's instruction of this number."""
        kind = self._device.type
        executions = [
            execute(self.schedules[rank], state, self._fragments, transport, None if ends is None else ends[rank])
            for (rank, state), transport in zip(self.states.items(), self.transports, strict=True)
        ]
        # The program has the casts of the autocast it was captured under; a second one must not act on it.
        with outside_inference_mode(), torch.no_grad(), torch.autocast(kind, enabled=False), current(self._device), self.around():
            try:
                self.world.run(executions, self.transports)
            except Exception as error:
                if self.world.recorder is not None:
                    self.world.recorder.failed(error)
                raise

    def _fill_for_forward(self) -> None:
        self._fill_parameters()
        others = [item for item in self.signature.inputs if item.kind != "parameter"]
        self._fill([item for item in others if item.kind != "tangent" or self.is_over_at_pause])

    def _fill(self, items: Sequence[Input]) -> None:
        for item in items:
            self._put(item, self._parts(item))

    def _fill_parameters(self) -> None:
        """Anew at every step: parameters may be written and replaced in between."""
        here = [each for each in self.places.parameters if each[0].name in self._tensors]  # others are another stage's, on a real mesh
        tensors = [self._tensors[item.name] for item, _ in here]
        as_they_are = self.world.as_they_are(tensors, [item for item, _ in here])
        for (item, places), tensor, held in zip(here, tensors, as_they_are, strict=True):
            if held is None:
                self._put(item, self.world.parameter_parts(tensor, item, self.mesh))
            else:
                for _, rank, name in places:
                    self._give(item, rank, name, held)

    def _put(self, item: Input, parts: Parts) -> None:
        """`parts` are by rank, and by microbatch where there are several."""
        for place, rank, name in self.places.of_input(item):
            self._give(item, rank, name, parts[place])

    def _give(self, item: Input, rank: int, name: str, tensor: torch.Tensor) -> None:
        if item.name in self._stored:
            self.states[rank].parked[name] = lying(tensor, f"parameter {item.name}")
        else:
            self.states[rank].buffers[name] = tensor

    def _parts(self, item: Input) -> Parts:
        world, each = self.world, self.mesh.num_microbatches
        ranks = [rank * each + number for rank in world.ranks for number in range(each)]
        if item.kind == "coordinate":
            return {rank: self._scalar(self.mesh.index(rank, item.name.split(","))) for rank in ranks}
        if item.kind == "random_key":
            return dict.fromkeys(ranks, self._scalar(self.key))
        if item.kind == "tangent":
            return dict.fromkeys(ranks, torch.full(item.shape, self._scale, dtype=item.dtype, device=self._device))
        values: dict[str, Callable[[], torch.Tensor]] = {
            "buffer": lambda: local_of(self._tensors[item.name]),
            "batch": lambda: self._batch[int(item.name)],
            "constant": lambda: self.places.constant(item.name, self._device),
        }
        return world.parts(values[item.kind](), item, self.mesh)

    def _scalar(self, value: int) -> torch.Tensor:
        # By a kernel: `torch.tensor` copies it from the host, which on a GPU waits for that.
        return torch.full((), value, dtype=torch.int64, device=self._device)


def made_in_inference_mode(model: nn.Module) -> bool:
    return any(each.is_inference() for each in (*model.parameters(), *model.buffers()))


@contextmanager
def outside_inference_mode(unless: bool = False) -> Generator[None]:
    """While this is entered what is made may be written, and differentiated, outside of inference mode: the memory of a run is that of the
    next one, be that a training step. Nothing is changed for a model that was `made_in_inference_mode`: it is written there alone."""
    if not torch.is_inference_mode_enabled() or unless:
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def current(device: torch.device) -> AbstractContextManager[Any]:
    """While this is entered fragments, which name a type of device, create tensors on this one: virtual ranks may be on any GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
