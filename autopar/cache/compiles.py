"""Whole compiles that an earlier process, or rank 0, has made of a model that does the same, asked for in the same way."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.cache.describe import NotKnown, described
from autopar.cache.folder import CacheFolder
from autopar.cache.surroundings import surroundings
from autopar.cache.trace import Trace, traced
from autopar.driver.compiled import Compiled, Forms
from autopar.driver.garbage import collection_paused
from autopar.driver.options import Options
from autopar.driver.serialize import CannotTravel, dumped, loaded
from autopar.graph.autocast import Autocast
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.program import Program

logger = logging.getLogger("autopar")
# `gather(value, what)`: every rank's value.
Gather = Callable[[Any, str], list[Any]]


@dataclass(frozen=True)
class Question:
    """What is asked to be compiled. `is_eager`: fragments run as they are, which the memory of a step depends on."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: Mesh
    options: Options
    placements: Mapping[str, Placement] | None
    is_eager: bool

    def is_answered_by(self, programs: Sequence[Program], trace: Trace) -> bool:
        """Whether what was captured does what the model does. Programs are faked on the CPU, and so is the model then."""
        on_cpu = self.options.device == "cpu" and all(each.device.type == "cpu" for each in self.model.parameters())
        try:
            reference = trace if on_cpu else traced(self.model, self.args, self.kwargs, torch.device("cpu"))
            return all(reference.is_done_by(each) for each in programs)
        except Exception as error:  # whatever a program cannot do on fake tensors, it is not known to do this
            logger.debug("what was captured does not run on fake tensors: %s", error)
            return False

    @collection_paused()
    def key(self) -> tuple[str, Trace]:
        """A digest that is equal where the answer is, and what the model does. Raises `NotKnown` where nobody can tell."""
        asked = (self.mesh, self.options, self.placements, self.is_eager, torch.is_grad_enabled(), Autocast.around(self.options.device))
        lines = (*surroundings(self.options.device), described(asked))
        trace = traced(self.model, self.args, self.kwargs)
        return hashlib.sha256(repr((*lines, *trace.lines)).encode()).hexdigest(), trace


@dataclass(frozen=True)
class Made:
    """A compile that was made here, and the FORWARD programs that were captured for it."""

    compiled: Compiled
    captured: Sequence[Program]


@dataclass(frozen=True)
class Reused:
    """Answers a question from a `folder`; else by `make`, which is told whether all ranks make it, and for those that come later.

    `forms` makes what inspection reads of a compile that was not made here. With `gather` there are several ranks: rank 0 answers for
    all whose models do the same; where one does something else, or cannot tell, each rank makes its own as it would without a cache.
    """

    folder: CacheFolder
    make: Callable[[bool], Made]
    forms: Callable[[Compiled], Forms]
    gather: Gather | None = None
    from_first: Callable[[Callable[[], Any]], Any] | None = None

    def answer(self, question: Question) -> Compiled:
        key, trace = None, None
        try:
            key, trace = question.key()
        except NotKnown as why:
            logger.info("this compile is not cached: %s", why)
        keys = [key] if self.gather is None else self.gather(key, "what the ranks' models do")
        if key is None or trace is None or set(keys) != {key}:
            return self.make(True).compiled
        if self.from_first is None:
            return self._read_or_made(question, key, trace)[1]
        here: list[Compiled] = []  # on rank 0

        def first() -> bytes | None:
            content, compiled = self._read_or_made(question, key, trace)
            here.append(compiled)
            return content

        content = self.from_first(first)
        if content is None:
            return self.make(True).compiled
        return here[0] if here else self._read(content, trace)

    def _read_or_made(self, question: Question, key: str, trace: Trace) -> tuple[bytes | None, Compiled]:
        """The compiled call, and the bytes that others can read; None where they cannot have it."""
        content = self.folder.read(key)
        compiled = content and self._readable(content, key, trace)
        if content and compiled:
            return content, compiled
        with _warnings() as warned:
            made = self.make(False)
        content = _content(made, question, trace, warned)
        if content is not None:
            self.folder.write(key, content)
        return content, made.compiled

    def _readable(self, content: bytes, key: str, trace: Trace) -> Compiled | None:
        try:
            return self._read(content, trace)
        except Exception as error:  # bytes that are no compile of ours may raise anything
            logger.warning("the compiled program in %s is not read: %s", self.folder.path / key, error)
            return None

    def _read(self, content: bytes, trace: Trace) -> Compiled:
        def make_forms() -> Forms:
            return self.forms(compiled)

        compiled = loaded(content, trace.spec.structure, trace.spec.leaves, make_forms)
        return compiled


def _content(made: Made, question: Question, trace: Trace, warned: Sequence[str]) -> bytes | None:
    """What is made, for others; None for what they cannot have."""
    if warned:
        logger.info("this compile is not cached: who reads it would not hear its warnings")
        return None
    if not question.is_answered_by(made.captured, trace):
        logger.info("this compile is not cached: what was captured does other ops than the model on fake tensors")
        return None
    try:
        return dumped(made.compiled)
    except CannotTravel as why:
        logger.info("this compile is not cached: %s", why)
        return None


@contextmanager
def _warnings() -> Generator[list[str]]:
    """What is warned of while this is entered. By a filter: a handler would keep logging from what it does without any."""
    heard: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            heard.append(record.getMessage())
        return True

    logger.addFilter(hear)
    try:
        yield heard
    finally:
        logger.removeFilter(hear)
