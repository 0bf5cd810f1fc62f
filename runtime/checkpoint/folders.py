"""A folder of checkpoints, each a folder that is there whole or not at all.

    run/
        00000004/  00000005/  00000006/     the last ones that were saved
            SHA256SUMS                      of all files beside it, as `sha256sum --check` reads it; written last
            index.json
            model-00000.safetensors ...
        .writing-00000007/                  what nobody reads: it becomes 00000007 by one rename, once all of it is on the disk

What a killed run has left behind (.writing-*, .removing-*) is removed by the next save.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.tensor_file import open_regular

logger = logging.getLogger("autopar")

SUMS, INDEX, LOCK = "SHA256SUMS", "index.json", ".lock"
_NUMBER = re.compile(r"\d{8}", re.ASCII)
_LEFT_BEHIND = re.compile(r"\.(writing|removing)-\d{8}", re.ASCII)
_SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][A-Za-z0-9_.-]*)\n", re.ASCII)
MAX_INDEX_BYTES = 1 << 30


class Writing:
    """A checkpoint that is being written into `path`, by rank 0 and those whom it tells. Another process that saves to the same folder
    at the same time is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        try:
            for each in folder.iterdir():
                if _LEFT_BEHIND.fullmatch(each.name):
                    _remove(each)
            number = max((int(each.name) for each in checkpoints(folder)), default=0) + 1
            self.path, self.target = folder / f".writing-{number:08d}", folder / f"{number:08d}"
            self.path.mkdir()
        except BaseException:
            _unlock(self._lock)
            raise

    def commit(self, index: str, sums: Mapping[str, str], keep: int) -> Path:
        """Let it be there, whole, and only the latest `keep` with it; `sums` are those of all files but the index."""
        content = index.encode()
        _write(self.path / INDEX, content)
        every = {**sums, INDEX: hashlib.sha256(content).hexdigest()}
        _write(self.path / SUMS, "".join(f"{each}  {name}\n" for name, each in sorted(every.items())).encode())
        _sync(self.path)
        self.path.rename(self.target)
        _sync(self.folder)
        for old in checkpoints(self.folder)[:-keep]:
            aside = self.folder / f".removing-{old.name}"
            try:
                old.rename(aside)  # so that nobody finds half of it
                _remove(aside)
            except OSError as error:
                logger.warning("%s should make room for newer checkpoints and cannot be removed: %s", old, error)
        self.end()
        return self.target

    def end(self) -> None:
        """Let others save here, and forget what is not committed."""
        if self._lock >= 0:
            _remove(self.path)
            _unlock(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A lock that ends with this process and what it forks meanwhile, if not before. File systems that lock nothing have to do without."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise CheckpointError(f"another process is saving to {folder} now: runs need folders of their own") from error
    except OSError as error:
        logger.warning("%s cannot be locked (%s): only one run may save there", folder, error.strerror)
    return lock


def _unlock(lock: int) -> None:
    """Closed alone, it would be held by what was forked meanwhile, as workers of loaders are."""
    with suppress(OSError):  # of file systems that lock nothing
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checkpoints(folder: Path) -> list[Path]:
    """Those in `folder`, oldest first."""
    return sorted(each for each in folder.iterdir() if _NUMBER.fullmatch(each.name) and each.is_dir() and not each.is_symlink())


def find(folder: Path) -> Path:
    """`folder` itself where it is a checkpoint, else the latest one in it. Raises `CheckpointError`."""
    if (folder / SUMS).exists() or (folder / INDEX).exists():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    return found[-1]


def read_sums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of each file by its name."""
    text = read_small(checkpoint / SUMS).decode("ascii", "replace")
    found = {name: each for each, name in _SUM.findall(text)}
    if "".join(f"{each}  {name}\n" for name, each in found.items()) != text or INDEX not in found:
        raise CheckpointError(f"{checkpoint / SUMS} is damaged: it is no list of SHA-256 sums with {INDEX} among them")
    return found


def read_index(checkpoint: Path, sums: Mapping[str, str]) -> bytes:
    content = read_small(checkpoint / INDEX)
    check_sum(checkpoint / INDEX, hashlib.sha256(content).hexdigest(), sums)
    return content


def check_sum(path: Path, found: str, sums: Mapping[str, str]) -> None:
    if found != sums[path.name]:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {found[:12]}…, and {SUMS} has {sums[path.name][:12]}…")


@contextmanager
def naming_others(checkpoint: Path) -> Generator[None]:
    """What cannot be read of a checkpoint is said with those that lie beside it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_others(checkpoint)}") from error


def _others(checkpoint: Path) -> str:
    try:
        others = [each.name for each in checkpoints(checkpoint.parent) if each != checkpoint] if _NUMBER.fullmatch(checkpoint.name) else []
    except OSError:  # the folder cannot be listed, of which the error in hand says enough
        return ""
    return f". Beside it are the checkpoints {', '.join(others)}: load one by its own path" if others else ""


def read_small(path: Path) -> bytes:
    file = open_regular(path)
    with os.fdopen(file, "rb") as opened:
        size = os.fstat(file).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, more than an index has")
        return opened.read()
