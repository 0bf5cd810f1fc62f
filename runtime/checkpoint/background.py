"""Checkpoints written behind the training: one thread for each world, with a process group of its own, one checkpoint after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.snapshot import Snapshot
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.world import World

logger = logging.getLogger("autopar")


class Saving(Future[Path]):
    """What becomes of a checkpoint; it knows whether its end was asked for."""

    is_told = False

    def result(self, timeout: float | None = None) -> Path:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.is_told = True
        return error

    def cancel(self) -> bool:
        """Other ranks may be writing already."""
        return False

    def run(self, make: Callable[[], Path], folder: Path) -> None:
        """Logs its error, too: of the last one of a script nobody may ask."""
        try:
            self.set_result(make())
        except BaseException as error:
            self.set_exception(error)
            logger.error("a checkpoint of %s is not written: %s: %s", folder, type(error).__name__, error)

    def finish(self) -> None:
        """Wait for it. Raises its error where nobody was told."""
        was_told = self.is_told
        error = self.exception()
        if error is not None and not was_told:
            raise error


class Background:
    """The thread of one world. What ranks tell each other there goes through gloo, in the order of the checkpoints: the groups in which
    training communicates are not touched."""

    def __init__(self, world: World) -> None:
        self.ranks = _ranks_beside(world)
        # What was copied for the latest checkpoint, in memory that the next one takes.
        self.copied: Snapshot | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._latest: Saving | None = None

    def start(self, make: Callable[[Ranks], Path], folder: Path) -> Saving:
        """Python waits for it before it ends."""
        self._latest = saving = Saving()
        self._thread.submit(saving.run, lambda: make(self.ranks), folder)
        return saving

    def wait(self, ranks: Ranks) -> None:
        """For what is under way, or ended since the last call. Raises its error on all ranks, unless all were told. Collective."""
        if self._latest is None:
            return
        try:
            ranks.attempt("write the checkpoint before this one", self._latest.finish)
        finally:
            if self._latest.is_told:  # an interrupted wait leaves it to the next one: a thread may still read what was copied
                self._latest = None


_BACKGROUNDS: WeakKeyDictionary[World, Background] = WeakKeyDictionary()


def background(world: World) -> Background:
    """Collective at the first call of a world."""
    if world not in _BACKGROUNDS:
        _BACKGROUNDS[world] = Background(world)
    return _BACKGROUNDS[world]


def wait_for_saving(world: World) -> None:
    """Until no checkpoint of this world is being written. Raises the error of one that was not, on all ranks, unless its future has told
    all of it. Collective."""
    if world in _BACKGROUNDS:
        _BACKGROUNDS[world].wait(Ranks.of(world))


def forget_copies(world: World) -> None:
    """Free the memory in which checkpoints of this world waited for being written."""
    if world in _BACKGROUNDS:
        _BACKGROUNDS[world].copied = None


def _ranks_beside(world: World) -> Ranks:
    if not isinstance(world, DistributedWorld):
        return Ranks.of(world)
    groups = world.groups  # and not the world, by which this is found while it lives
    members = groups.global_ranks
    with groups.naming_all("a group in which to save"):
        group: Any = dist.new_group(list(members), backend="gloo")
    order = [sorted(members).index(each) for each in members]

    def gather(value: Any, what: str) -> list[Any]:
        told: list[Any] = [None] * len(members)
        with groups.naming_all(what):
            dist.all_gather_object(told, value, group=group)
        return [told[place] for place in order]

    return Ranks(world.rank, len(members), gather)
