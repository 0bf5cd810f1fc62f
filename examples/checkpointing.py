"""When a run is saved, and where it goes on: every so many steps, at Ctrl-C and SIGTERM, at its end."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
from options import Options
from text import Windows
from torch.optim.lr_scheduler import LRScheduler

import autopar


class Checkpoints:
    """Those of one run, in the folder `--save`; does nothing without one.

    A signal is noted, and the step that runs is finished; a third one has its usual effect (torchrun sends one more for each that it gets).
    Where one process has heard a signal, the same step is the last of all.
    """

    def __init__(self, options: Options, parallel: autopar.ParallelModule | None, windows: Windows, schedule: LRScheduler) -> None:
        self._options, self._parallel, self._windows, self._schedule = options, parallel, windows, schedule
        self._heard, self._num_heard, self._usual = "", 0, dict[int, Any]()
        if options.save is not None:
            self._usual = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard, self._num_heard = signal.Signals(number).name, self._num_heard + 1
        if self._num_heard == 2:
            self.end()

    def end(self) -> None:
        """Let signals have their usual effect."""
        for number, handler in self._usual.items():
            signal.signal(number, handler)

    def resume(self) -> int:
        """How many steps are done: those of the latest checkpoint where `--resume` asks for it, and there is one."""
        folder = self._options.save
        if not self._options.resume or folder is None or not any(folder.glob("[0-9]*")):
            return 0
        assert self._parallel is not None
        note = autopar.load(folder, self._parallel, data=self._windows, global_data=True)
        self._schedule.load_state_dict(note["schedule"])
        return note["steps"]

    def after(self, steps: int, updates: bool) -> str:
        """Save where it is time, after so many steps; the last one updates or not; what ends the run, "" for nothing."""
        folder = self._options.save
        if folder is None or not updates:
            return ""
        heard = self._heard_anywhere()
        every = self._options.save_every
        if heard or steps == self._options.steps or (every and steps // every > (steps - self._options.accumulate) // every):
            assert self._parallel is not None
            note = {"steps": steps, "schedule": self._schedule.state_dict()}
            autopar.save(folder, self._parallel, note=note, data=self._windows)
        return heard

    def _heard_anywhere(self) -> str:
        if not torch.distributed.is_initialized():
            return self._heard
        told = torch.tensor(int(bool(self._heard)), device=self._options.device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        return self._heard or ("a signal to another process" if told.item() else "")
