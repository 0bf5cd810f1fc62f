"""Runs cases in processes of their own: a kernel that hangs or breaks its device ends its case, and not the benchmark."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.gpu_case import Case, Place, Row, first_line

# What a process makes its cases by: a function of a module, since cases do not travel.
Cases = Callable[[Place], list[Case]]


@dataclass(frozen=True)
class Order:
    """A case by name. `only_compile` fills the compilers' caches, on disk, for a run that is timed."""

    name: str
    only_compile: bool = False


@dataclass(frozen=True)
class Answer:
    """The rows of an order; `is_broken` where the process that gave them can go no further."""

    order: Order
    rows: list[Row]
    is_broken: bool = False


def serve(pipe: Connection, place: Place, make_cases: Cases) -> None:
    """Answer orders until None comes."""
    torch.set_num_threads(1)
    cases = {case.name: case for case in make_cases(place)}
    while (order := pipe.recv()) is not None:
        answer = answered(cases[order.name], order, place)
        pipe.send(answer)
        if answer.is_broken:
            return


def answered(case: Case, order: Order, place: Place) -> Answer:
    torch.manual_seed(0)
    try:
        rows = [{"part": case.part} | row for row in case.run(order.only_compile)]
    except Exception as error:  # one case that fails must not hide the others
        rows = [failure(order, first_line(error))]
    try:
        place.finish()
        if place.on_gpu:
            torch.cuda.empty_cache()
    except Exception as error:
        # After a fault in a kernel every call of the process fails.
        return Answer(order, [*rows, failure(order, f"the device gave up: {first_line(error)}")], is_broken=True)
    return Answer(order, rows)


def failure(order: Order, error: str) -> Row:
    part = "compile" if order.only_compile else "failed"
    return {"part": part, "case": order.name, "error": error}


class Worker:
    """A process that runs `serve`, and the order that it is at."""

    def __init__(self, place: Place, make_cases: Cases) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process: Any = context.Process(target=serve, args=(theirs, place, make_cases), daemon=True)
        self._process.start()
        theirs.close()  # so that a process that dies ends our wait
        self.order: Order | None = None
        self.deadline = float("inf")

    def start(self, order: Order, limit_seconds: float) -> None:
        self.order, self.deadline = order, time.monotonic() + limit_seconds
        self.pipe.send(order)

    def answer(self) -> Answer:
        """To be called when the pipe has something, or has ended."""
        assert self.order is not None
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return self._broken(f"its process ended with {self._process.exitcode}")
        self.order = None
        return answer

    def overdue(self, limit_seconds: float) -> Answer:
        self._process.kill()
        return self._broken(f"took more than {limit_seconds:.0f} s")

    def _broken(self, error: str) -> Answer:
        assert self.order is not None
        return Answer(self.order, [failure(self.order, error)], is_broken=True)

    def dismiss(self) -> None:
        """Let it end, without waiting for it; in the middle of an order it is killed."""
        if self.order is not None:
            self._process.kill()
        with contextlib.suppress(OSError):  # it may have ended by itself
            self.pipe.send(None)

    def close(self) -> None:
        self.dismiss()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


def answers(
    make_cases: Cases, place: Place, orders: Sequence[Order], num_workers: int, until: float, limit_seconds: float
) -> Iterator[Answer]:
    """As they come. None is started after `until` (`time.monotonic`); each may take `limit_seconds`, its process's start included."""
    waiting = deque(orders)
    idle = [Worker(place, make_cases) for _ in range(min(num_workers, len(orders)))]
    busy: list[Worker] = []
    try:
        while True:
            while waiting and idle and time.monotonic() < until:
                worker = idle.pop()
                worker.start(waiting.popleft(), limit_seconds)
                busy.append(worker)
            if not busy:
                return
            for worker, answer in _next(busy, limit_seconds):
                busy.remove(worker)
                if answer.is_broken:
                    worker.close()
                    worker = Worker(place, make_cases) if waiting else None
                idle += [worker] if worker else []
                yield answer
    finally:
        for worker in [*idle, *busy]:
            worker.dismiss()
        for worker in [*idle, *busy]:
            worker.close()


def _next(busy: Sequence[Worker], limit_seconds: float) -> list[tuple[Worker, Answer]]:
    """Those that have answered, ended, or taken too long."""
    patience = max(min(worker.deadline for worker in busy) - time.monotonic(), 0.0)
    ready = wait([worker.pipe for worker in busy], patience)
    found = [(worker, worker.answer()) for worker in busy if worker.pipe in ready]
    late = [worker for worker in busy if worker.pipe not in ready and time.monotonic() >= worker.deadline]
    return [*found, *((worker, worker.overdue(limit_seconds)) for worker in late)]
