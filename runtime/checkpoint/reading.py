"""A checkpoint that is read: every file of it is checked before anything is used."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.folders import INDEX, SUMS, check_sum, naming_others, read_index, read_sums
from autopar.runtime.checkpoint.index import Index, Stored, form_of
from autopar.runtime.checkpoint.slices import Slices, are_apart, copy, shape_of
from autopar.runtime.checkpoint.tensor_file import TensorFile


class Reading:
    """The checkpoint at `path`, or what it has of some `kinds` of tensors. Raises `CheckpointError`, naming the file."""

    def __init__(self, path: Path, kinds: Collection[str] | None = None) -> None:
        self.path = path
        with naming_others(path):
            self._sums = read_sums(path)
            self.index = Index.parse(read_index(path, self._sums), path / INDEX)
            self._expected = self._expected_of(kinds)
        self._files: dict[str, TensorFile] = {}

    def _expected_of(self, kinds: Collection[str] | None) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """By file the tensors that must be in it, with their forms."""
        found: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for kind, name, stored in self.index.stored():
            for piece in stored.pieces if kinds is None or kind in kinds else ():
                if piece.file not in self._sums:
                    raise CheckpointError(f"{self.path / INDEX} names {piece.file!r}, which is not in {SUMS}")
                expected = found.setdefault(piece.file, {})
                if name in expected:
                    raise CheckpointError(f"{self.path / INDEX} has two pieces of {name!r} in {piece.file}")
                expected[name] = stored.dtype, shape_of(piece.slices)
        return found

    def check(self, rank: int, num_ranks: int) -> None:
        """Compare this rank's share of the files with their SHA-256, and all of what it has of the headers with the index."""
        with naming_others(self.path):
            for file in sorted(self._expected)[rank::num_ranks]:
                check_sum(self.path / file, self._file(file).sha256(), self._sums)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            opened = TensorFile(self.path / name)
            forms = {each: (form.dtype, form.shape) for each, form in opened.forms.items()}
            if forms != self._expected[name]:
                wrong = next(each for each in {**forms, **self._expected[name]} if forms.get(each) != self._expected[name].get(each))
                found, wanted = (form_of(*of[wrong]) if wrong in of else "nothing" for of in (forms, self._expected[name]))
                raise CheckpointError(f"{opened.path} has {found} for {wrong!r}, and the index {wanted}")
            self._files[name] = opened
        return self._files[name]

    def require(self, name: str, stored: Stored, slices: Slices) -> None:
        """Raise now what `read` would raise."""
        for piece in stored.pieces:
            if not are_apart(piece.slices, slices):
                self._file(piece.file).tensor(name)

    def read(self, name: str, stored: Stored, slices: Slices, target: torch.Tensor) -> None:
        """Write `slices` of a tensor into `target`, of that shape; only pieces that have some of them are read. Casts."""
        for piece in stored.pieces:
            if not are_apart(piece.slices, slices):
                copy(self._file(piece.file).tensor(name), piece.slices, target, slices)
