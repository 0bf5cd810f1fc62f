"""Weights to and from plain safetensors files, under the model's own names: what transformers writes and reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.background import wait_for_saving
from autopar.runtime.checkpoint.folders import find, read_small
from autopar.runtime.checkpoint.held import MODEL, model_state
from autopar.runtime.checkpoint.index import FILE_NAME, Index, Piece, Stored
from autopar.runtime.checkpoint.load import Loading
from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.reading import Reading
from autopar.runtime.checkpoint.slices import Slices, copy, whole
from autopar.runtime.checkpoint.tensor_file import TensorFile, parse_json, write
from autopar.runtime.module.parallel_module import ParallelModule

NAME = "model.safetensors"
WEIGHT_MAP = f"{NAME}.index.json"


def export_safetensors(checkpoint: str | os.PathLike[str], target: str | os.PathLike[str], *, max_file_bytes: int = 5_000_000_000) -> Path:
    """Write the model of a checkpoint, or of the latest in a folder of them, as whole tensors under its own names into the new folder
    `target`, which `from_pretrained` reads where a configuration is beside it. Needs no ranks: one process calls it.

    Of tied weights one is written, as transformers does. Memory: that of one file. Raises `CheckpointError`.
    """
    reading, folder = Reading(find(Path(checkpoint)), (MODEL,)), Path(target)
    reading.check(0, 1)
    folder.mkdir(parents=True, exist_ok=True)
    stored, files, num_bytes = reading.index.tensors.get(MODEL, {}), list[list[str]](), 0
    for name, each in stored.items():
        size = _num_bytes(each)
        if not files or num_bytes + size > max_file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(name)
        num_bytes += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = NAME if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
        for name, tensor in tensors.items():
            reading.read(name, stored[name], whole(stored[name].shape), tensor)
        if (folder / file).exists():
            raise CheckpointError(f"{folder / file} is there already: export into a new folder")
        write(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        content = {"metadata": {"total_size": sum(map(_num_bytes, stored.values()))}, "weight_map": weight_map}
        (folder / WEIGHT_MAP).write_text(json.dumps(content, indent=2))
    return folder


def _num_bytes(stored: Stored) -> int:
    return stored.dtype.itemsize * torch.Size(stored.shape).numel()


def import_safetensors(path: str | os.PathLike[str], parallel: ParallelModule, cast: bool = False) -> None:
    """Take the weights of plain safetensors files: one file, or a folder as transformers writes it. Collective.

    Each process reads what it holds. Of weights that are tied here any of their names will do. Raises `CheckpointError`, and changes
    nothing, where names, shapes or dtypes (but see `load`: `cast`) differ, or a file is not as it must be; such files have no SHA-256.
    """
    wait_for_saving(parallel._world)
    ranks = Ranks.of(parallel._world)
    files = ranks.attempt("read the files", lambda: PlainFiles(Path(path), model_state(parallel).ties))
    loading = ranks.attempt("compare the files with the model", lambda: Loading(files, parallel, None, cast, True))
    ranks.attempt("read the model", loading.apply)


class PlainFiles:
    """Whole tensors by name; `ties` are those of the model that is to take them."""

    def __init__(self, path: Path, ties: Mapping[str, str]) -> None:
        self.path = path
        files = {each: TensorFile(each) for each in _files(path)}
        self._tensors = {name: (file, name) for file in files.values() for name in file.forms}
        for name, first in ties.items():
            if first not in self._tensors and name in self._tensors:
                self._tensors[first] = self._tensors[name]
            elif name in self._tensors and not torch.equal(self._tensor(name), self._tensor(first)):
                raise CheckpointError(f"{path}: {name!r} and {first!r} are tied in the model, and differ there")
        stored = {
            name: Stored(file.forms[own].dtype, file.forms[own].shape, (Piece(file.path.name, whole(file.forms[own].shape)),))
            for name, (file, own) in self._tensors.items()
            if name not in ties
        }
        self.index = Index({MODEL: stored}, ties)

    def _tensor(self, name: str) -> torch.Tensor:
        file, own = self._tensors[name]
        return file.tensor(own)

    def require(self, name: str, stored: Stored, slices: Slices) -> None:
        self._tensor(name)

    def read(self, name: str, stored: Stored, slices: Slices, target: torch.Tensor) -> None:
        copy(self._tensor(name), whole(stored.shape), target, slices)


def _files(path: Path) -> list[Path]:
    """Links are followed: the caches of the hub are made of them."""
    if not path.is_dir():
        return [path.resolve()]
    if not (path / WEIGHT_MAP).exists():
        return [(path / NAME).resolve()]
    content = parse_json(read_small((path / WEIGHT_MAP).resolve()), str(path / WEIGHT_MAP))
    match content:
        case {"weight_map": dict(names)} if all(isinstance(each, str) and FILE_NAME.fullmatch(each) for each in names.values()):
            return [(path / each).resolve() for each in sorted(set(names.values()))]
        case _:
            raise CheckpointError(f"{path / WEIGHT_MAP} names no files beside it")
