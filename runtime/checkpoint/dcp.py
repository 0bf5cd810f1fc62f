"""Weights from a folder of torch.distributed.checkpoint (DCP), as FSDP2 scripts and torchtitan write it.

The folder's `.metadata` is a pickle: whoever wrote it can have any code run by whoever reads it. So it is read by consent alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.background import wait_for_saving
from autopar.runtime.checkpoint.held import MODEL, model_state
from autopar.runtime.checkpoint.index import Index, Piece, Stored
from autopar.runtime.checkpoint.load import Loading
from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.slices import Slices, copy, tiling_problem, whole
from autopar.runtime.module.parallel_module import ParallelModule

# What torch.compile, activation checkpointing and DDP put into the names of what they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_SHOWN = 5


def import_dcp(
    folder: str | os.PathLike[str], parallel: ParallelModule, *, allow_pickle: bool = False, prefix: str | None = None, cast: bool = False
) -> None:
    """Take the weights of a folder that torch.distributed.checkpoint wrote. Collective.

    The model's names stand in it as they are, or behind one prefix ("model." of `dcp.save({"model": model.state_dict(), ...})`), which is
    found; what torch.compile and activation checkpointing add to names is left out. Each process reads one whole tensor at a time.

    allow_pickle  consent to unpickle the folder's `.metadata`, which can run any code: for folders of those that you trust
    prefix        which of several models in the folder is meant: "ema."
    cast          as of `autopar.load`

    Raises `CheckpointError`, and changes nothing, without that consent (then nothing is read, either), where names, shapes or dtypes
    differ, or where a file is not as it must be; such files have no SHA-256.
    """
    path = Path(folder)
    if not allow_pickle:
        raise CheckpointError(
            f"{path / '.metadata'} is a pickle, and reading it can run any code that its writer put there: pass allow_pickle=True if you "
            "trust them, or have them write safetensors (torch.distributed.checkpoint.HuggingFaceStorageWriter) for import_safetensors"
        )
    wait_for_saving(parallel._world)
    ranks, ties = Ranks.of(parallel._world), model_state(parallel).ties
    names = {*model_state(parallel).forms, *ties}
    files = ranks.attempt(f"read {path / '.metadata'}", lambda: DcpFiles(path, names, ties, prefix))
    loading = ranks.attempt("compare the folder with the model", lambda: Loading(files, parallel, None, cast, True))
    ranks.attempt("read the model", loading.apply)


class _Reader(FileSystemReader):
    """Reads `.metadata` once, however many tensors follow."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._known: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known


class DcpFiles:
    """The tensors of a folder that are the model's `names`, of which `ties` stand for others."""

    def __init__(self, path: Path, names: set[str], ties: Mapping[str, str], prefix: str | None) -> None:
        self.path, self._reader = path, _Reader(path)
        if not (path / ".metadata").is_file():
            raise CheckpointError(f"{path} has no .metadata: it is no folder of torch.distributed.checkpoint")
        try:
            metadata = self._reader.read_metadata()
            entries = {name: each for name, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
        except Exception as error:  # whatever an unpickler raises
            raise CheckpointError(f"{path / '.metadata'} cannot be read: {type(error).__name__}: {error}") from error
        plain = {_unwrapped(name): name for name in entries}
        prefix = _prefix_of(plain, names, ties, path) if prefix is None else prefix
        # What lies beside a model without a prefix, an optimizer's state, begins as none of its names do.
        first = {name.partition(".")[0] for name in names}
        self._own = {
            name.removeprefix(prefix): own
            for name, own in plain.items()
            if name.startswith(prefix) and (prefix or name.partition(".")[0] in first)
        }
        for own in self._own.values():
            _check_covered(path, own, entries[own])
        for name, of in ties.items():
            own = self._own.pop(name, None)
            if own is None:
                continue
            if of in self._own and not _is_equal(self._tensor(entries, own), self._tensor(entries, self._own[of])):
                raise CheckpointError(f"{path}: {name!r} and {of!r} are tied in the model, and differ there")
            self._own.setdefault(of, own)
        self._entries = entries
        stored = {name: _stored(entries[own]) for name, own in self._own.items()}
        self.index = Index({MODEL: stored}, ties)

    def _tensor(self, entries: Mapping[str, TensorStorageMetadata], own: str) -> torch.Tensor:
        entry = entries[own]
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_dcp({own: value}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            why = next((f"{type(each).__name__}: {each}" for each, _ in error.failures.values()), "no reason was given")
            raise CheckpointError(f"{self.path}: {own!r} cannot be read: {why}"[:500]) from error
        return value

    def require(self, name: str, stored: Stored, slices: Slices) -> None:
        """Read it once for nothing: what is damaged is found before anything is changed."""
        self._tensor(self._entries, self._own[name])

    def read(self, name: str, stored: Stored, slices: Slices, target: torch.Tensor) -> None:
        copy(self._tensor(self._entries, self._own[name]), whole(stored.shape), target, slices)


def _check_covered(path: Path, own: str, entry: TensorStorageMetadata) -> None:
    """DCP reads what there is, and leaves other elements as they were."""
    pieces = [tuple(((start, start + size),) for start, size in zip(each.offsets, each.sizes, strict=True)) for each in entry.chunks]
    shape = tuple(entry.size)
    problem = tiling_problem(pieces, shape) if pieces else "nothing of it was saved"
    if problem and prod(shape):
        raise CheckpointError(f"{path}: {own!r} of shape {list(shape)} is not whole: {problem}")


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _stored(entry: TensorStorageMetadata) -> Stored:
    shape = tuple(entry.size)
    return Stored(entry.properties.dtype, shape, (Piece("", whole(shape)),))


def _unwrapped(name: str) -> str:
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


def _prefix_of(plain: Mapping[str, str], names: set[str], ties: Mapping[str, str], path: Path) -> str:
    """What stands before the model's names. Raises `CheckpointError` where it is not one thing."""
    sample = next((name for name in sorted(names, key=len, reverse=True) if name not in ties and name not in ties.values()), min(names))
    found = {name.removesuffix(sample) for name in plain if name == sample or name.endswith(f".{sample}")}
    # An optimizer's state has the model's names within its own.
    fitting = [prefix for prefix in sorted(found) if sum(prefix + name in plain for name in names) >= len(names) - len(ties)]
    if len(fitting) > 1:
        raise CheckpointError(f"{path} has several tensors called {sample!r}, behind {', '.join(map(repr, fitting))}: say which by prefix=")
    if not fitting:
        shown = ", ".join(map(repr, sorted(plain)[:_SHOWN]))
        prefix = min(found, key=len, default="")
        missing = [name for name in sorted(names - set(ties)) if prefix + name not in plain]
        raise CheckpointError(
            f"{path} is of another model: {missing[0]!r} is not there, nor {len(missing) - 1} others of its names; it has {shown}, …"
        )
    return fitting[0]
