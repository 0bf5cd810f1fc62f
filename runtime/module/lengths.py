"""Calls whose batches are padded to one of a few lengths: inputs grow at their end, and outputs are cut to the batch's own length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.driver.pad_to import PadTo
from autopar.errors import AutoparError, InputError
from autopar.ir.mesh import Mesh
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import CallInputs, Lengths, batch_dims_of, innermost

# By the flat index of an output's tensor: its dims that count positions, and how many more it has of them than the inputs.
LengthDims = Mapping[str, Mapping[int, int]]
# The structure of an output, and its flat leaves, of a tensor its shape.
Described = tuple[Any, Sequence[Any]]
# How many lengths are tried of those that come, besides each that is shorter than all before: trying one takes a run on fake tensors.
MAX_TRIED = 4


@dataclass
class CutOutputs:
    """How outputs of the padded length are cut, once calls told: the lengths for which that was `tried`."""

    dims: LengthDims = field(default_factory=dict[str, Mapping[int, int]])
    tried: set[int] = field(default_factory=set[int])

    def learn(self, lengths: Lengths, describe: Callable[[int], Described]) -> None:
        """By what the model gives, on fake tensors, for batches of such a length. The same on all ranks, and so are the errors."""
        new = [
            each
            for each in sorted({lengths.shortest, lengths.longest} - {*self.tried, lengths.padded})
            if len(self.tried) < MAX_TRIED or each < min(self.tried)
        ]
        long = describe(lengths.padded) if new else None
        for each in new:
            assert long is not None
            dims = length_dims(describe(each), long, each, lengths.padded)
            if self.tried and dims != self.dims:
                raise _not_cut(f"the model's outputs depend on the length in one way up to {min(self.tried)}, in another from there")
            self.dims = dims
            self.tried.add(each)

    def cut(self, tensors: Mapping[str, torch.Tensor], own: int) -> dict[str, torch.Tensor]:
        """Outputs by flat index, cut to what a batch of length `own` gives; gradients flow through."""
        found = dict(tensors)
        for index in found.keys() & self.dims.keys():
            for dim, more in self.dims[index].items():
                found[index] = found[index].narrow(dim, 0, own + more)
        return found


@dataclass(frozen=True)
class _Padding:
    """How the inputs of one call are padded: by flat index the value, and their common length."""

    values: Mapping[int, float]
    length: int

    @staticmethod
    def of(inputs: CallInputs, pad_to: PadTo, batch_dims: Mapping[int, int]) -> _Padding:
        """Raises `InputError` for inputs of which it is not known how."""
        values: dict[int, float] = {}
        lengths: dict[str, int] = {}
        others: dict[str, torch.Tensor] = {}
        for index, name, tensor in inputs.tensors:
            given = innermost(pad_to.values, name)
            value = None if given is None else pad_to.values[given]
            if given is None:
                others[name] = tensor
            elif value is not None:
                _check_dim(name, tensor, pad_to.dim, batch_dims.get(index))
                _check_value(name, tensor, value)
                values[index], lengths[name] = value, tensor.shape[pad_to.dim]
        if not values:
            raise InputError(f"pad_to= names none of this call's inputs, which are {', '.join(inputs.names)}: give a value to each")
        if len({*lengths.values()}) > 1:
            raise InputError(f"inputs that pad_to= pads differ in length: {', '.join(f'{name} {each}' for name, each in lengths.items())}")
        (length,) = {*lengths.values()}
        alike = [name for name, tensor in others.items() if tensor.ndim > pad_to.dim and tensor.shape[pad_to.dim] == length]
        if alike:
            raise InputError(
                f"{alike[0]!r} has length {length} in dim {pad_to.dim}, as the inputs have that pad_to= pads, and no value there: give it "
                f"one, or None if it stays as it is, values={{{alike[0]!r}: ...}}"
            )
        return _Padding(values, length)

    def grown(self, inputs: CallInputs, dim: int, lengths: Lengths) -> CallInputs:
        leaves = list(inputs.leaves)
        for index, value in self.values.items():
            leaves[index] = _grown(leaves[index], dim, lengths.padded, value)
        return replace(inputs, leaves=tuple(leaves), lengths=lengths)


def _check_dim(name: str, tensor: torch.Tensor, dim: int, batch_dim: int | None) -> None:
    if not 0 <= dim < tensor.ndim:
        raise InputError(f"{name!r} has shape {list(tensor.shape)}, and pad_to= pads dim {dim}, which it has not: say another dim=")
    if batch_dim == dim:
        raise InputError(f"dim {dim} of {name!r} counts samples, and pad_to= pads positions: say another dim=, or batch_dims=")


def _check_value(name: str, tensor: torch.Tensor, value: float) -> None:
    """Whether or not this batch is made longer: of those of other ranks some may be."""
    why = f"pad_to= pads {name!r}, of {tensor.dtype}, with {value!r}, which that cannot hold"
    try:
        held = torch.empty((), dtype=tensor.dtype).fill_(value).item()
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{why}: {error}") from error
    if not tensor.is_floating_point() and held != value:
        raise InputError(f"{why}: it would be {held!r}")


def _grown(tensor: torch.Tensor, dim: int, length: int, value: float) -> torch.Tensor:
    if tensor.shape[dim] == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length
    grown = tensor.new_full(shape, value)
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown


def padded(inputs: CallInputs, pad_to: PadTo, batch_dims: Any, mesh: Mesh, world: World) -> CallInputs:
    """The inputs of a call at one length on all ranks, that of the longest batch. Collective. Raises `InputError` on all ranks."""
    error, padding, told = None, None, None
    try:
        padding = _Padding.of(inputs, pad_to, batch_dims_of(inputs, batch_dims))
        told = (padding.length, pad_to.target(padding.length))
    except Exception as caught:  # whatever it is, the peers must hear of it
        error = caught
    if world.is_virtual and error is not None:
        raise error
    everyone = [told] if world.is_virtual else _told_by_ranks(told, error, world, _places(inputs, mesh))
    assert padding is not None
    shortest, longest, length = _agreed([each for each in everyone if each is not None])
    return padding.grown(inputs, pad_to.dim, Lengths(pad_to.dim, tuple(padding.values), padding.length, shortest, longest, length))


def _places(inputs: CallInputs, mesh: Mesh) -> list[int]:
    """By rank which batch it has: along dp each place has its own; of a global batch all have the same."""
    return [0 if inputs.dims is not None else mesh.index(rank, mesh.parts("dp")) for rank in range(mesh.size)]


def _told_by_ranks(
    told: tuple[int, int] | None, error: Exception | None, world: World, places: Sequence[int]
) -> Sequence[tuple[int, int] | None]:
    """The length of each rank's batch, and what it is to be padded to; one of them for all where they are alike."""
    what = "a comparison of the ranks' lengths"
    if world.is_equal(0 if told is None else told[0] + 1, what) and told is not None:  # a batch may be of length 0
        return [told]
    problem = str(error) if isinstance(error, AutoparError) else repr(error)
    everyone: Sequence[tuple[tuple[int, int] | None, str]] = world.gather((told, problem), what)
    problems = {text: rank for rank, (each, text) in reversed([*enumerate(everyone)]) if each is None}
    if problems:
        raise InputError("\n".join(f"rank {rank}: {text}" for text, rank in problems.items())) from error
    first = {place: rank for rank, place in reversed([*enumerate(places)])}
    lengths = [each[0] for each, _ in everyone if each is not None]
    for rank, length in enumerate(lengths):
        other = first[places[rank]]
        if length != lengths[other]:
            raise InputError(
                f"ranks {other} and {rank} pass batches of lengths {lengths[other]} and {length}, and are to pass the same batch"
            )
    return [each for each, _ in everyone]


def _agreed(told: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """The shortest batch, the longest, and what all are padded to."""
    return min(own for own, _ in told), max(own for own, _ in told), max(length for _, length in told)


def at_length(lengths: Lengths, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Such a padded call, of any number of samples, at this `length`."""
    inputs = CallInputs.of(args, kwargs)
    return inputs.call(lambda index, each: each.narrow(lengths.dim, 0, length) if index in lengths.inputs else each)


def length_dims(short: Described, long: Described, own: int, padded: int) -> LengthDims:
    """From what the model gives for batches of length `own` and of the `padded` one. Raises `InputError` for outputs that depend on the
    length in another way than by tensors that have its positions, some more, or some fewer."""
    if short[0] != long[0]:
        raise _not_cut(
            f"the model returns a structure of {len(short[1])} values for a batch of length {own}, and another, of {len(long[1])}, for one "
            f"of {padded}"
        )
    found: dict[str, dict[int, int]] = {}
    for index, (small, large) in enumerate(zip(short[1], long[1], strict=True)):
        if small == large and type(small) is type(large):
            continue
        told = f"output {index} of the model is {_told(small)} for a batch of length {own}, and {_told(large)} for one of {padded}"
        if not isinstance(small, torch.Size) or not isinstance(large, torch.Size) or len(small) != len(large):
            raise _not_cut(told)
        dims = [dim for dim, (less, more) in enumerate(zip(small, large, strict=True)) if less != more]
        if any(large[dim] - small[dim] != padded - own for dim in dims):
            raise _not_cut(told)
        found[str(index)] = {dim: large[dim] - padded for dim in dims}
    return found


def _told(leaf: Any) -> str:
    return f"of shape {list(leaf)}" if isinstance(leaf, torch.Size) else repr(leaf)


def _not_cut(why: str) -> InputError:
    return InputError(f"{why}: it cannot be cut to the batch's own length. Return the loss alone, or leave out pad_to=")
