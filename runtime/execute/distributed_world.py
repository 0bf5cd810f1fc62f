"""One rank of a mesh of processes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.driver.compiled import Compiled
from autopar.errors import ScheduleError
from autopar.frontend.refusals import refuse_placed
from autopar.frontend.shared_memory import refuse_shared_parameters
from autopar.ir.instructions import Launch
from autopar.ir.mesh import MICROBATCHES, Mesh, parent
from autopar.ir.padding import Padding, padded, unpadded
from autopar.ir.placement import Placement
from autopar.ir.program import Input, Output
from autopar.ir.sharding import Sharding
from autopar.runtime._torch import local_part, plain_parts
from autopar.runtime.birth.values import Values
from autopar.runtime.birth.weights import place_buffers
from autopar.runtime.execute.agreement import accepted, telling
from autopar.runtime.execute.distributed import DistributedTransport
from autopar.runtime.execute.group_cache import distrust
from autopar.runtime.execute.interpreter import Execution
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.execute.recorder import MeshRecorder, proposed_folder, recorder_of
from autopar.runtime.execute.shares import joined, own_share
from autopar.runtime.execute.transport import Transport
from autopar.runtime.execute.world import Own, Parts, RankParts
from autopar.runtime.module.dtensors import take_over
from autopar.runtime.module.numbers_of_stages import lies_on_stage
from autopar.runtime.module.parameters import assemble, local_shard
from autopar.runtime.module.placement import (
    all_placements,
    check_equal_models,
    held_part,
    like,
    place_parameters,
    refined_device_mesh,
    stage_device_mesh,
    whole_placement,
)
from autopar.runtime.offload.stored import store_of


class DistributedWorld:
    """This process's rank of a torch `DeviceMesh`."""

    is_virtual = False

    def __init__(self, device_mesh: DeviceMesh, timeout: float | None = None) -> None:
        self.mesh = Mesh.of(device_mesh)
        self.device_mesh = device_mesh
        self.groups = ProcessGroups(device_mesh, timeout)
        self.rank = self.groups.rank
        self.ranks = (self.rank,)
        self.placements: dict[str, Placement] = {}
        self._transports: dict[Mesh, DistributedTransport] = {}
        self._refined = self.mesh
        # By parameter the places on `pp` that hold it.
        self.holders: dict[str, tuple[int, ...]] = {}
        self.recorder: MeshRecorder | None = None
        # Whether parameters lie in memory that they may not leave: in files, or where a GPU copies from.
        self.is_stored = False
        # Places parameters of a model as its first capture had it.
        self._place_parameters: Callable[..., None] | None = None
        take_over()

    def device(self, model: nn.Module) -> torch.device:
        return self.groups.device

    def prepare(self, compiled: Compiled) -> None:
        answers = self.gather((compiled.fingerprint, proposed_folder()), "a comparison of the ranks' programs")
        fingerprints = [fingerprint for fingerprint, _ in answers]
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise ScheduleError(  # one that still compiles answers something else
                    f"ranks 0 and {rank} compiled different programs ({str(fingerprints[0])[:12]} and {str(fingerprint)[:12]}): "
                    "model, inputs' shapes, options and versions must be equal on all ranks"
                )
        mesh = self._refined = compiled.mesh.ranks
        self.recorder = recorder_of(answers[0][1], mesh, self.rank, self.groups.global_ranks)
        launches = [step for schedule in compiled.schedules for step in schedule.instructions if isinstance(step, Launch)]
        tangents = [_dp_axes_beside(item, mesh) for item in compiled.signature.inputs_of("tangent")]
        axes_sets = [step.axes for step in launches] + tangents + [mesh.parts("pp"), mesh.without("pp").names]
        axes_sets += [mesh.parts("dp")] if any(item.shares for item in compiled.signature.inputs) else []
        self.groups.create(mesh, [axes for axes in axes_sets if axes], [(each.axes, each.node_size) for each in launches if each.node_size])
        self.groups.create_channels({channel for rank in range(mesh.size) for channel in compiled.schedule_of(rank).channels(mesh, rank)})

    def place(self, model: nn.Module, compiled: Compiled, values: Values | None = None) -> None:
        if values is None:
            with telling(self, "a comparison of the ranks' models"):
                refuse_placed(model)  # by another parallel module, since the compile
                refuse_shared_parameters(model, compiled.facts.constants)
            check_equal_models(model, self.gather)
        mesh = compiled.mesh.ranks
        stage = mesh.without("pp") if mesh.names != ("pp",) else Mesh((("dp", 1),))
        with self.groups.naming_all("the groups of the refined mesh"):
            self.device_mesh = refined_device_mesh(self.device_mesh, mesh)
        self.placements = all_placements(model, compiled.signature, stage)
        self.holders = _holders(self.placements, compiled)
        held = {name for name, stages in self.holders.items() if self.stage in stages}
        with self.groups.naming_all("the groups of the parameters' mesh"):
            device_mesh = stage_device_mesh(self.device_mesh, stage)
        if mesh.size_of(mesh.parts("pp")) > 1:
            lies_on_stage(device_mesh)
        store = store_of(compiled, self.groups.device)
        self.is_stored = bool(compiled.stored)
        rank, device = self._place(stage), self.device(model)
        self._place_parameters = partial(
            place_parameters,
            placements=self.placements,
            device_mesh=device_mesh,
            rank=rank,
            device=device,
            held=held,
            store=store,
            on_stages={name for name, stages in self.holders.items() if len(stages) > 1},
        )
        self._place_parameters(model, parts=values)
        place_buffers(model, values, self.device(model))

    def place_anew(self, model: nn.Module, names: Collection[str]) -> None:
        """Parameters of `model` that were put in the place of placed ones lie as these did. Not collective: values are not compared."""
        assert self._place_parameters is not None, "nothing is placed before the first capture"
        self._place_parameters(model, only=names)
        place_buffers(model, None, self.device(model))  # the modules that they came with may have some

    def transports(self, mesh: Mesh) -> tuple[Transport, ...]:
        if mesh not in self._transports:
            self._transports[mesh] = DistributedTransport(self.groups, mesh)
        return (self._transports[mesh],)

    @property
    def waited_seconds(self) -> float:
        """How long this rank was blocked in WAITs so far: on a GPU, where those wait in streams, nearly nothing."""
        return sum(each.waited_seconds for each in self._transports.values())

    def run(self, executions: Sequence[Execution], transports: Sequence[Transport]) -> None:
        try:
            for execution in executions:
                for blocked in execution:
                    raise AssertionError(f"a real rank blocks inside its waits and never yields: {blocked}")
        except BaseException:
            distrust()  # what was launched may never be waited for
            raise

    def gather(self, value: Any, what: str = "") -> list[Any]:
        return accepted(self.groups.gather(value, what) if what else self.groups.gather(value))

    def is_equal(self, number: int, what: str, place: str = "") -> bool:
        return self.groups.is_equal(number, what, place)

    def expect_equal(self, number: int, what: str, place: str = "") -> None:
        self.groups.expect_equal(number, what, place)

    @property
    def is_expecting(self) -> bool:
        return self.groups.is_expecting

    def hear(self) -> None:
        self.groups.hear()

    def give_up(self) -> None:
        self.groups.give_up()

    def meet(self, what: str, place: str) -> None:
        self.groups.maxima([], f"{what} of module {self.groups.number}", f"{what} ({place})")

    def expect_meeting(self, what: str, place: str, number: int) -> None:
        self.groups.expect_equal(number, f"{what} of module {self.groups.number}", f"{what} ({place})")

    def _place(self, mesh: Mesh) -> int:
        """Where this rank stands on a mesh that may lack `pp` or count microbatches (the first)."""
        return mesh.rank_at({MICROBATCHES: 0, "dp": 0, **self._refined.coordinates(self.rank)})

    @property
    def stage(self) -> int:
        """This rank's place on `pp`."""
        return self._refined.index(self.rank, self._refined.parts("pp"))

    def is_first(self, name: str) -> bool:
        """Whether this rank is the first of those that hold its part of the parameter."""
        placement = self.placements.get(name)
        mesh, used = (placement.mesh, placement.sharding.axes) if placement else (self.mesh, ())
        at = mesh.coordinates(self._place(mesh))
        return self.holders.get(name, (0,))[0] == self.stage and all(index == 0 for axis, index in at.items() if axis not in used)

    def _places(self, mesh: Mesh) -> range:
        """This rank's places on a mesh that may count microbatches."""
        each = mesh.num_microbatches
        return range(self.rank * each, self.rank * each + each)

    def as_they_are(self, parameters: Sequence[torch.Tensor], items: Sequence[Input]) -> list[torch.Tensor | None]:
        assert all(isinstance(each, DTensor) for each in parameters), f"not all of these are DTensors: {[item.name for item in items]}"
        return [part if item.padding is None else None for part, item in zip(plain_parts(parameters), items, strict=True)]

    def parameter_parts(self, parameter: torch.Tensor, item: Input, mesh: Mesh) -> Parts:
        assert isinstance(parameter, DTensor), f"parameter {item.name} is no DTensor"
        return dict.fromkeys(self._places(mesh), padded(local_part(parameter).detach(), self._local_padding(item, mesh)))

    def parts(self, value: torch.Tensor, item: Input, mesh: Mesh) -> Parts:
        assert item.sharding is not None, item
        placement, ranks = Placement(item.dims, item.sharding, mesh), mesh.ranks
        if item.shares:
            value = joined(value, item, partial(self._gathered_along, ranks.parts("dp"), ranks))
        elif item.kind in ("batch", "tangent"):
            placement = _within_share(placement)
        value = item.entering(value)
        return {place: local_shard(value, placement.dims, placement.sharding, mesh, place) for place in self._places(mesh)}

    def tangent_parts(self, value: torch.Tensor, item: Input, mesh: Mesh, is_equal: bool) -> Parts:
        # Each rank's own loss has a tangent of its own; what is differentiated is their mean.
        axes, ranks = _dp_axes_beside(item, mesh.ranks), mesh.ranks
        if is_equal and not item.shares:
            return self.parts(value * (ranks.size_of(axes) / ranks.num_shares), item, mesh)
        return self.parts((value if item.shares else self._summed(value, axes, ranks)) / ranks.num_shares, item, mesh)

    def _gathered_along(self, axes: tuple[str, ...], mesh: Mesh, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each rank along `axes` has, in order. Collective."""
        if not axes:
            return (tensor,)
        (transport,) = self.transports(mesh)
        (gathered,) = transport.wait(transport.launch(Launch("all_gather", "copy", axes, ("shares",), ("shares",)), [tensor]))
        return tuple(gathered)

    def _summed(self, value: torch.Tensor, axes: tuple[str, ...], mesh: Mesh) -> torch.Tensor:
        if not axes:
            return value
        (transport,) = self.transports(mesh)
        return transport.wait(transport.launch(Launch("all_reduce", "sum", axes, ("tangent",), ("tangent",)), [value.detach()]))[0]

    def whole(self, parts: Parts, item: Output, mesh: Mesh) -> torch.Tensor:
        assert item.sharding is not None, item
        share = _within_share(Placement(item.dims, item.sharding, mesh))
        if len(parts) > 1:
            over_time = Mesh(((MICROBATCHES, mesh.num_microbatches),))
            found = assemble(dict(enumerate(parts[place] for place in sorted(parts))), share.dims, share.sharding, over_time)
        else:
            assert share.sharding.is_replicated, f"{item.kind} {item.name} must leave split by dp at most, not {item.sharding}"
            found = next(iter(parts.values())).clone()
        return own_share(found, item, self._refined, self.rank, self._gathered_along) if item.shares else found

    def gradients(self, held: Sequence[RankParts], parameters: Sequence[torch.Tensor], own: Own) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        parts = own([part for each in held for part in each.parts.values()])
        for part, (_, item, mesh), parameter in zip(parts, held, parameters, strict=True):
            assert isinstance(parameter, DTensor), f"parameter {item.name} is no DTensor"
            part = part if item.padding is None else unpadded(part, self._local_padding(item, mesh))
            device = local_part(parameter).device
            found.append(like(parameter, part if part.device == device else part.to(device)))
        return found

    def _local_padding(self, item: Input | Output, mesh: Mesh) -> Padding | None:
        if item.padding is None:
            return None
        assert item.sharding is not None, item
        return Placement(item.dims, item.sharding, mesh, item.padding).local_padding(self._place(mesh))

    def part(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """What this rank holds of a parameter."""
        placement = self.placements.get(name) or whole_placement(whole, self.mesh)
        return held_part(whole, placement, self._place(placement.mesh))

    def full(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        placement = self.placements.get(name) or whole_placement(parameter, self.mesh.without("pp"))
        holder = self.holders.get(name, (0,))[0]
        if self.stage == holder:
            whole = self._gathered(parameter, placement, name)
        else:
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.groups.device)
        return self.from_stage(whole, holder)

    def from_stage(self, whole: torch.Tensor, stage: int) -> torch.Tensor:
        """What the ranks of `stage` have, on those of all; the others give memory to write into. Collective."""
        return self.groups.broadcast(whole, self._refined, self._refined.parts("pp"), stage)

    def whole_at_stage(self, tensor: DTensor, name: str) -> torch.Tensor:
        """What lies as the parameter does, whole on every rank of its stage. Collective over that."""
        return self._gathered(tensor, self.placements[name], name)

    def _gathered(self, parameter: torch.Tensor, placement: Placement, name: str) -> torch.Tensor:
        assert isinstance(parameter, DTensor), name
        held = parameter.to_local().detach().to(self.groups.device)
        mesh, local = placement.mesh, padded(held, placement.local_padding(self._place(placement.mesh)))
        axes = tuple(axis for axis in mesh.names if axis in self._refined.names)
        if not axes:
            return unpadded(local, placement.padding).clone()  # there is nobody to gather from
        (transport,) = self.transports(self._refined)
        (gathered,) = transport.wait(transport.launch(Launch("all_gather", "copy", axes, (name,), (name,)), [local]))
        return unpadded(assemble(dict(enumerate(gathered)), placement.dims, placement.sharding, mesh), placement.padding)


def _holders(placements: Mapping[str, Placement], compiled: Compiled) -> dict[str, tuple[int, ...]]:
    """By parameter the places on `pp` whose ranks read it; all of them where nobody does."""
    stages = range(len(compiled.schedules))
    reads = [{item.name for item in schedule.signature.inputs_of("parameter")} for schedule in compiled.schedules]
    return {name: tuple(stage for stage in stages if name in reads[stage]) or tuple(stages) for name in placements}


def _dp_axes_beside(tangent: Input, mesh: Mesh) -> tuple[str, ...]:
    """The axes of dp along which every rank has the whole tangent: there each has the one of its own loss, and they are summed."""
    assert tangent.sharding is not None, tangent
    return tuple(axis for axis, size in mesh.axes if parent(axis) == "dp" and size > 1 and axis not in tangent.sharding.axes)


def _within_share(placement: Placement) -> Placement:
    """How one dp share lies on the mesh, when the whole lies as `placement`."""
    mesh, kept = placement.mesh, []
    only_dp = Sharding(tuple(tuple(axis for axis in split if parent(axis) == "dp") for split in placement.sharding.splits))
    for split in placement.sharding.splits:
        kept.append(tuple(axis for axis in split if parent(axis) != "dp"))
    return Placement(only_dp.local_dims(placement.dims, mesh), Sharding(tuple(kept), placement.sharding.unreduced), mesh)
