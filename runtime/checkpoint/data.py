"""The position in the data: the state of a loader that has one, such as torchdata's StatefulDataLoader, as a part of a checkpoint.

Processes at one place along dp feed the same samples, so there is a state for each place, and one alone where all are equal. A state is
values and tensors, see `autopar.runtime.checkpoint.values`; what else there is in one would have to be pickled, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.held import Held
from autopar.runtime.checkpoint.slices import whole
from autopar.runtime.checkpoint.values import encode
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.module.inputs import checksum
from autopar.runtime.module.parallel_module import ParallelModule

DATA = "data"
PLACES, STATES = "places", "states"


@runtime_checkable
class StatefulData(Protocol):
    """What knows its position, and goes on from one; `load_state_dict` is called before anything is drawn."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Position:
    """Of the loader at a place along dp: its state as JSON, and a sum of its tensors."""

    place: int
    state: Any
    sums: Mapping[str, str] = field(default_factory=dict[str, str])

    def equals(self, other: Position) -> bool:
        """Whether both stand at the same sample; tensors are named by the place."""
        return self._without_place() == other._without_place()

    def _without_place(self) -> tuple[str, dict[str, str]]:
        own = f"{self.place}/"
        names = {name.removeprefix(own): sum for name, sum in self.sums.items()}
        return json.dumps(_renamed(self.state, own), sort_keys=True), names


def _renamed(state: Any, own: str) -> Any:
    match state:
        case {"tensor": str(name)} if len(state) == 1:
            return {"tensor": name.removeprefix(own)}
        case dict():
            return {key: _renamed(value, own) for key, value in state.items()}
        case list():
            return [_renamed(value, own) for value in state]
        case _:
            return state


def place_of(parallel: ParallelModule) -> int:
    """Along dp; virtual ranks are fed by one loader."""
    world = parallel._world
    return parallel.mesh.index(world.rank, parallel.mesh.parts("dp")) if isinstance(world, DistributedWorld) else 0


def num_places(parallel: ParallelModule) -> int:
    return parallel.mesh.num_shares if isinstance(parallel._world, DistributedWorld) else 1


def position_of(data: StatefulData | None, place: int) -> tuple[Position | None, dict[str, Held]]:
    """Where `data` stands, and the tensors in that by name. Raises `CheckpointError` for what is no value, by its place in the state."""
    if data is None:
        return None, {}
    if not isinstance(data, StatefulData):
        raise CheckpointError(
            f"data= is a {type(data).__name__}, which has no state_dict() and load_state_dict(): pass a loader that knows its position "
            "(torchdata's StatefulDataLoader), or put the position into note="
        )
    held: dict[str, Held] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        if name in held:
            raise CheckpointError(f"two entries of it are called {name!r}")
        held[name] = Held(tensor.detach(), tuple(tensor.shape), whole(tuple(tensor.shape)))

    try:
        state = encode(data.state_dict(), str(place), keep)
    except CheckpointError as error:
        raise CheckpointError(f"the state of data= at place {place} along dp cannot be saved: {error}") from error
    return Position(place, state, {name: checksum(each.tensor) for name, each in held.items()}), held


def joined(positions: Sequence[Position | None]) -> dict[str, Any] | None:
    """The number of places and their states, one alone where all are equal, of what each rank told; None where no rank has any.

    Raises `CheckpointError` where ranks at one place stand elsewhere.
    """
    told = [each for each in positions if each is not None]
    if len(told) != len(positions):
        if told:
            raise CheckpointError("some ranks pass data= and others none: pass the loader of each rank")
        return None
    by_place: dict[int, tuple[int, Position]] = {}
    for rank, each in enumerate(told):
        first, known = by_place.setdefault(each.place, (rank, each))
        if not known.equals(each):
            raise CheckpointError(
                f"data= of ranks {first} and {rank}, which feed the same samples (place {each.place} along dp), stands elsewhere: they "
                "must draw the same batches"
            )
    found = [by_place[place][1] for place in sorted(by_place)]
    alike = all(found[0].equals(each) for each in found)
    return {PLACES: len(found), STATES: [found[0].state] if alike else [each.state for each in found]}


def state_for(data: Mapping[str, Any], place: int, places: int, is_global: bool, path: object) -> Any:
    """The saved state for this place. Raises `CheckpointError` where the places are others, and the position is not a global one."""
    saved, states = data[PLACES], data[STATES]
    if saved == places or (is_global and len(states) == 1):
        return states[place if len(states) > 1 else 0]
    if len(states) > 1:
        what, instead = "which stood at samples of their own", ""
    else:
        what = (
            "which say the same: where the global batch stands, or, as with a DistributedSampler, how many batches each drew of its share"
        )
        instead = ", pass global_data=True if it is the first"
    raise CheckpointError(
        f"{path} has the positions of {saved} loaders along dp, {what}; here there are {places} places along dp: load on dp = {saved}"
        f"{instead}, or pass data=False and set the position yourself"
    )
