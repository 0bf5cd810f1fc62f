"""Real text that every machine with Python has: the source files of its standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_SYMBOLS = 256
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def read_text(path: Path | None = None, max_bytes: int = 8_000_000) -> Tensor:
    """The bytes of `path`, or of the standard library's sources in the order of their names, as uint8 [num_bytes].

    Raises `ValueError` when there is nothing to read.
    """
    if path is not None:
        content = path.read_bytes()[:max_bytes]
        if not content:
            raise ValueError(f"{path} is empty; --text needs a file with some text")
    else:
        content = _standard_library(max_bytes)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _standard_library(max_bytes: int) -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file for file in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts))
    content = bytearray()
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        content += file.read_bytes()
        if len(content) >= max_bytes:
            break
    if not content:
        raise ValueError(f"no source files of the standard library under {root}; name a text with --text PATH")
    return bytes(content[:max_bytes])


class Windows:
    """Random windows of a text, in batches of `num_windows`, the last of every `epoch` windows as many as are left.

    The sequence depends on the seed only, so every rank draws the same global batches.
    """

    def __init__(self, text: Tensor, num_windows: int, length: int, seed: int, epoch: int = 0) -> None:
        if len(text) <= length:
            raise ValueError(f"the text has {len(text)} bytes; windows of {length} need at least {length + 1}")
        self._text, self._num_windows = text, num_windows
        self._epoch, self._num_drawn = epoch, 0
        self._offsets = torch.arange(length)
        self._generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"num_drawn": self._num_drawn, "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_drawn = state["num_drawn"]
        self._generator.set_state(state["generator"])

    def draw(self) -> Tensor:
        """The next windows, int64 [num_windows, length]; fewer at the end of an epoch."""
        number = min(self._num_windows, self._epoch - self._num_drawn % self._epoch) if self._epoch else self._num_windows
        self._num_drawn += number
        starts = torch.randint(len(self._text) - len(self._offsets) + 1, (number, 1), generator=self._generator)
        return self._text[starts + self._offsets].long()
