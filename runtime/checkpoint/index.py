"""The index of a checkpoint: which tensors there are, of which pieces in which files, and all that is no tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.slices import Slices, problem_of, tiling_problem
from autopar.runtime.checkpoint.tensor_file import NAMES, parse_json

FORMAT, VERSION = "autopar checkpoint", 1
# A file beside the index, and nothing else that a path could be.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}
_NUMBERS = 2**62  # more elements than there can be


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor, in a file under the tensor's name, run after run."""

    file: str
    slices: Slices


@dataclass(frozen=True)
class Stored:
    """A tensor; its pieces hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def form(self) -> str:
        return form_of(self.dtype, self.shape)


def form_of(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True)
class Index:
    """`tensors` by kind ("model", "optimizer", "ema") and name. The rest is JSON, written by `autopar.runtime.checkpoint.held`.

    ties       names of the model under which a tensor stands once more, with the name under which it is stored
    extra      what `get_extra_state()` of submodules gave, by name in the state dict
    optimizer  its class, groups and state; None where there is none
    training   seed, step, counts, loss scale
    data       how many places along dp loaders stood at, and their states, one alone where all are equal; None where there is none
    """

    tensors: Mapping[str, Mapping[str, Stored]]
    ties: Mapping[str, str] = field(default_factory=dict[str, str])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Any = None
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: Any = None
    data: Mapping[str, Any] | None = None

    def stored(self) -> Iterator[tuple[str, str, Stored]]:
        """Each tensor with its kind and name."""
        for kind, tensors in self.tensors.items():
            for name, each in tensors.items():
                yield kind, name, each

    def text(self) -> str:
        tensors = {
            kind: {
                name: {
                    "dtype": str(each.dtype).removeprefix("torch."),
                    "shape": each.shape,
                    "pieces": [{"file": piece.file, "slices": piece.slices} for piece in each.pieces],
                }
                for name, each in of_kind.items()
            }
            for kind, of_kind in self.tensors.items()
        }
        content = {"format": FORMAT, "version": VERSION, "tensors": tensors, "ties": self.ties, "extra": self.extra}
        content |= {"optimizer": self.optimizer, "training": self.training, "note": self.note, "data": self.data}
        # A line for each tensor would be ten times as many bytes with indent=; one line for each part can be looked at.
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items())
        return f"{{\n{lines}\n}}\n"

    @classmethod
    def parse(cls, text: bytes, path: object) -> Index:
        """Raises `CheckpointError`, naming `path`, for what is no index."""
        content = parse_json(text, str(path))
        match content:
            case {"format": str(name), "version": version} if name == FORMAT and version != VERSION:
                raise CheckpointError(f"{path} is of version {version!r} of the format, and this autopar reads version {VERSION}")
            case {
                "format": str(name), "tensors": dict(tensors), "ties": dict(ties), "extra": dict(extra), "training": dict(training),
                "optimizer": optimizer, "note": note,
            } if name == FORMAT and all(isinstance(each, str) for each in ties.values()):  # fmt: skip
                stored = {kind: _all_stored(of_kind, f"{path}: {kind}") for kind, of_kind in tensors.items()}
                data = content.get("data")  # which earlier versions of this format lack
                if _is_optimizer(optimizer) and _is_training(training) and _is_data(data):
                    return cls(stored, ties, extra, optimizer, training, note, data)
            case _:
                pass

        raise CheckpointError(f"{path} is no index of an autopar checkpoint")


def _all_stored(tensors: Any, where: str) -> dict[str, Stored]:
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{where} is no JSON object")
    return {name: _stored(each, f"{where} {name!r}") for name, each in tensors.items()}


def _stored(entry: Any, where: str) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": [*sizes], "pieces": [*pieces]} if dtype in _DTYPES and all(map(_is_size, sizes)) and pieces:
            if prod(sizes) < _NUMBERS:
                shape = tuple(sizes)
                found = tuple(_piece(each, shape, where) for each in pieces)
                if problem := tiling_problem([each.slices for each in found], shape):
                    raise CheckpointError(f"{where}: {problem}")
                return Stored(_DTYPES[dtype], shape, found)
        case _:
            pass
    raise CheckpointError(f"{where} is wrong: {str(entry)[:200]}")


def _piece(entry: Any, shape: tuple[int, ...], where: str) -> Piece:
    match entry:
        case {"file": str(file), "slices": [*dims]} if FILE_NAME.fullmatch(file) and all(map(_are_runs, dims)):
            slices = tuple(tuple((start, stop) for start, stop in runs) for runs in dims)
            if problem := problem_of(slices, shape):
                raise CheckpointError(f"{where}: {problem}")
            return Piece(file, slices)
        case _:
            pass
    raise CheckpointError(f"{where} has a piece that is none: {str(entry)[:200]}")


def _are_runs(runs: Any) -> bool:
    return isinstance(runs, list) and all(isinstance(run, list) and len(run) == 2 and all(map(_is_size, run)) for run in runs)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _NUMBERS


def _is_optimizer(value: Any) -> bool:
    match value:
        case None:
            return True
        case {"class": str(), "groups": [*groups], "state": dict(state)}:
            return all(map(_is_group, groups)) and all(isinstance(each, dict) and "dict" in each for each in state.values())
        case _:
            return False


def _is_group(value: Any) -> bool:
    match value:
        case {"params": [*names], "options": dict()}:
            return all(isinstance(name, str) for name in names)
        case _:
            return False


def _is_training(value: Any) -> bool:
    match value:
        case {"seed": int() | None, "step": int(), "num_calls": int(), "loss_scale": scale, "scaler": scaler}:
            return all(map(_is_scale, (scale, scaler)))
        case _:
            return False


def _is_scale(value: Any) -> bool:
    match value:
        case None | {"scale": float() | int(), "num_finite": int()}:
            return True
        case _:
            return False


def _is_data(value: Any) -> bool:
    match value:
        case {"places": int(places), "states": list(states)}:
            return places >= 1 and len(states) in (1, places)
        case _:
            return value is None
