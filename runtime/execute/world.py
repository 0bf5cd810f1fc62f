"""What the runtime asks of the ranks that this process runs: all of them on a virtual mesh, one on a real mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.driver.compiled import Compiled
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Output
from autopar.runtime._torch import local_part
from autopar.runtime.birth.values import Values
from autopar.runtime.execute.interpreter import Execution
from autopar.runtime.execute.recorder import MeshRecorder
from autopar.runtime.execute.transport import Transport

Parts = dict[int, torch.Tensor]
Own = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class RankParts(NamedTuple):
    """What the ranks of one stage hold of a result; `parts` are by rank of `mesh`, which is that stage's."""

    parts: Parts
    item: Output
    mesh: Mesh


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return local_part(tensor) if isinstance(tensor, DTensor) else tensor


class World(Protocol):
    """What differs between virtual and real ranks. `Parts` are tensors by rank, for the ranks of this process.

    Where a mesh counts microbatches, each rank has a part for every one of them: `rank * num_microbatches + microbatch`.

    Values that cross the border to the user are global on a virtual mesh; on a real one batch inputs, outputs
    and tangents are this rank's share along dp, and parameters are DTensors.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    is_virtual: bool

    @property
    def recorder(self) -> MeshRecorder | None: ...

    def device(self, model: nn.Module) -> torch.device: ...

    def prepare(self, compiled: Compiled) -> None:
        """Make ready to run `compiled`; raises `ScheduleError` when ranks hold different programs. Collective."""

    def place(self, model: nn.Module, compiled: Compiled, values: Values | None = None) -> None:
        """Give the parameters of `model` their place, once; on a real mesh with these `values`, where there are such."""

    def transports(self, mesh: Mesh) -> tuple[Transport, ...]:
        """The ends that one call uses, one per rank of this process."""
        ...

    def run(self, executions: Sequence[Execution], transports: Sequence[Transport]) -> None: ...

    def gather(self, value: Any, what: str = "") -> list[Any]:
        """Every rank's picklable `value`. Collective. `what` it is stands in the error when a rank does not answer. Raises what a rank
        raised that was to come here (`autopar.runtime.execute.agreement`)."""
        ...

    def is_equal(self, number: int, what: str, place: str = "") -> bool:
        """Whether every rank has this `number`, of 62 bits at most. Collective, and quicker than `gather`. `place` tells those that are at
        something else what this is."""
        ...

    def expect_equal(self, number: int, what: str, place: str = "") -> None:
        """Go on as if `is_equal` had said that every rank has this number, while they tell each other. Collective. `hear` raises
        `UnequalError`, on all ranks, where they have several, and so does whatever they say to each other before that."""
        ...

    @property
    def is_expecting(self) -> bool:
        """Whether it is not known yet that all is as expected."""
        ...

    def hear(self) -> None:
        """Wait until that is known."""
        ...

    def give_up(self) -> None:
        """Whether all is as expected does not matter any more to this rank, which has raised an error."""
        ...

    def meet(self, what: str, place: str) -> None:
        """Go on once all ranks of this module are at `what`, `place` says more of it. Collective. Raises `InputError` on all where one is
        at something else."""
        ...

    def expect_meeting(self, what: str, place: str, number: int) -> None:
        """Go on as if all ranks of this module were at `what`, with one `number`; see `expect_equal`."""
        ...

    def as_they_are(self, parameters: Sequence[torch.Tensor], items: Sequence[Input]) -> list[torch.Tensor | None]:
        """What all ranks of this process are given of each parameter, where that is one tensor and no copy."""
        ...

    def parameter_parts(self, parameter: torch.Tensor, item: Input, mesh: Mesh) -> Parts: ...

    def parts(self, value: torch.Tensor, item: Input, mesh: Mesh) -> Parts: ...

    def tangent_parts(self, value: torch.Tensor, item: Input, mesh: Mesh, is_equal: bool) -> Parts:
        """Of what a backward begins from, which is of one element and the same on all ranks where it `is_equal`."""
        ...

    def whole(self, parts: Parts, item: Output, mesh: Mesh) -> torch.Tensor: ...

    def gradients(self, held: Sequence[RankParts], parameters: Sequence[torch.Tensor], own: Own) -> list[torch.Tensor]:
        """Those of `parameters`, in memory that nothing else looks at: `own` gives parts that."""
        ...

    def full(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The global value of a parameter, in memory of its own. Collective."""
        ...
