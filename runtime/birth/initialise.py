"""Values from the model's own initialisers, tensor by tensor, the same on every mesh."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import networkx
import torch
from torch import nn

from autopar.errors import WeightsError
from autopar.runtime.birth.draws import Drawn, Ranges, TiledFills, drawing
from autopar.runtime.birth.initialisers import Effect, Initialise, Initialiser, effects_of, initialisers_of
from autopar.runtime.birth.slots import get, names_of, put, replaced, slots_of, stand_in
from autopar.runtime.birth.values import Values, held_ranges
from autopar.runtime.module.inputs import checksum
from autopar.runtime.module.parameters import Placement
from autopar.runtime.module.placement import held_part

_ADVICE = (
    "give the module a reset_parameters() that writes them (what its __init__ sets is lost on meta), a function of modules for all "
    "such, weights=lambda module: ..., or values before autopar.compile"
)


class Initialised(Values):
    """What the initialisers of `model` write into its tensors on meta; those that have values keep them.

    A tensor is drawn alone: it is real while the calls that write it run, and all others are on meta, where nothing is computed. What
    initialisers make of other tensors' values is drawn together with these. Draws begin anew for each tensor, from `seed` and its
    name: not which rank draws, nor what it drew before, makes a difference.

    Those that are `given` otherwise need no initialiser. Raises `WeightsError`, before anything is drawn, for tensors that no call writes.
    """

    def __init__(self, model: nn.Module, seed: int, also: Initialise | None = None, given: Container[str] = ()) -> None:
        self._model, self._seed = model, seed
        self._slots, self._names = slots_of(model), names_of(model)
        self._calls = initialisers_of(model, also)
        self._effects = effects_of(model, self._calls)
        self._groups = _groups(self._names, self._effects)
        self._waiting: dict[str, torch.Tensor] = {}
        mine = [name for name in self._names if name not in given]
        self.identity = {name: "meta" if (tensor := self._slots[name]).is_meta else checksum(tensor) for name in mine}
        self._check(mine)

    def _check(self, names: Sequence[str]) -> None:
        written = set[str]().union(*(effect.written for effect in self._effects))
        lost = [name for name in names if self._slots[name].is_meta and name not in written]
        if lost:
            raise WeightsError(f"no initialiser writes {told_of(self._model, lost)}: {_ADVICE}")

    def __contains__(self, name: str) -> bool:
        return self._slots[name].is_meta

    def whole(self, name: str) -> torch.Tensor:
        return self._value(name, None)

    def part(self, name: str, placement: Placement, rank: int) -> torch.Tensor:
        return held_part(self._value(name, held_ranges(placement, rank)), placement, rank)

    def _value(self, name: str, wanted: Ranges | None) -> torch.Tensor:
        """The whole tensor, of which what is not `wanted` need not have its values."""
        if not self._slots[name].is_meta:
            return self._slots[name].detach()
        if name not in self._waiting:
            self._waiting |= self._born(self._groups[name], wanted)
        return self._waiting.pop(name)

    def elsewhere(self, name: str) -> None:
        self._waiting.pop(name, None)

    def _born(self, group: tuple[str, ...], wanted: Ranges | None) -> dict[str, torch.Tensor]:
        """Values of those tensors of `group` that have none."""
        calls, is_whole = self._calls_for(group)
        real = {name: self._begun(name, is_whole) for name in group}
        touched = {name for number in calls for name in self._effects[number].touched}
        others = {name: stand_in(self._slots[name], "meta") for name in touched if name not in real}
        # A part can be drawn alone where each of its elements depends on nothing else.
        is_apart = is_whole and len(group) == 1 and not any(group[0] in self._effects[number].read for number in calls)
        fills = TiledFills(Drawn(each, f"{self._seed}/{name}", wanted if is_apart else None) for name, each in real.items())
        with replaced(self._model, others | real), drawing(f"{self._seed}/{group[0]}"), torch.no_grad(), torch.device("cpu"), fills:
            for number in calls:
                self._run(self._calls[number], real)
        found = {name: tensor.detach() for name, tensor in real.items() if self._slots[name].is_meta}
        if not is_whole:
            self._check_written(found)
        return found

    def _calls_for(self, group: tuple[str, ...]) -> tuple[list[int], bool]:
        """The calls that give `group` its values, from the last that overwrites all of it on; whether there is one."""
        numbers = [number for number, effect in enumerate(self._effects) if effect.written & set(group)]
        for position in reversed(range(len(numbers))):
            if set(group) <= self._effects[numbers[position]].overwritten:
                return numbers[position:], True
        return numbers, False

    def _begun(self, name: str, is_overwritten: bool) -> torch.Tensor:
        tensor = self._slots[name]
        real = stand_in(tensor, "cpu")
        if not tensor.is_meta:
            real.data.copy_(tensor.detach())
        elif not is_overwritten:
            # What is left of it was not written.
            real.data.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
        return real

    def _run(self, call: Initialiser, real: Mapping[str, torch.Tensor]) -> None:
        try:
            call.run()
        except Exception as error:  # whatever the user's code raises
            names = ", ".join(map(repr, real))
            raise WeightsError(f"{call}, called for {names} alone, failed: {type(error).__name__}: {error}. {_ADVICE}") from error
        for name, tensor in real.items():
            if (now := get(self._model, name)) is not tensor:  # the call set another one in its place
                tensor.data.copy_(now.detach())
                put(self._model, name, tensor)

    def _check_written(self, found: Mapping[str, torch.Tensor]) -> None:
        left = [name for name, tensor in found.items() if tensor.is_floating_point() and bool(tensor.isnan().any())]
        if left:
            raise WeightsError(f"initialisers leave parts of {told_of(self._model, left)} unwritten, or NaN: {_ADVICE}")


def _groups(names: Mapping[str, Sequence[str]], effects: Sequence[Effect]) -> dict[str, tuple[str, ...]]:
    """By first name those tensors that get their values together, in the model's order."""
    first = {name: each for each, all_names in names.items() for name in all_names}
    graph = networkx.Graph()
    graph.add_nodes_from(names)
    graph.add_edges_from((name, first[source]) for effect in effects for name, source in effect.joined if name in names)
    order = {name: number for number, name in enumerate(names)}
    groups = (tuple(sorted(group, key=order.__getitem__)) for group in networkx.connected_components(graph))
    return {name: group for group in groups for name in group}


def told_of(model: nn.Module, names: Sequence[str]) -> str:
    """The first few tensors, with the classes of their modules."""
    kinds = {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names[:3]}
    listed = ", ".join(f"{name!r} (of a {kind})" for name, kind in kinds.items())
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
