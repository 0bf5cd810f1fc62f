"""One call, compiled here or read from a cache: what a compile makes, and what makes it again when somebody asks for its forms."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar._torch import outside_fake_modes
from autopar.cache.again import Circumstances, forms_of, without_values
from autopar.cache.compiles import Gather, Made, Question, Reused
from autopar.cache.folder import CacheFolder
from autopar.captured import Captures
from autopar.driver.alone import TRACING
from autopar.driver.compiled import Compiled, Forms
from autopar.driver.decide_once import FromFirst
from autopar.driver.options import Options
from autopar.graph.model_device import model_device
from autopar.plans.plan import Plan
from autopar.reports.memory import Memory
from autopar.reports.weighed import weighed
from autopar.reports.within_budget import within_budget
from autopar.runtime.module.placement import global_parameters

Call = tuple[tuple[Any, ...], dict[str, Any]]
# What `autopar.compiler.compile_call` makes of a call and options, with what brings rank 0's decisions, and what is captured already.
CompileBy = Callable[[Call, Options, FromFirst | None, Captures], Compiled]


@dataclass(frozen=True)
class CallCompiler:
    """Compiles the call of a `question` within its budget; `from_first` and `gather` are those of several ranks."""

    question: Question
    compile_by: CompileBy
    memory: Callable[[Compiled], Memory]
    by_name: tuple[Options, ...]
    from_first: FromFirst | None
    gather: Gather | None

    def compiled(self, cache: str | os.PathLike[str] | None) -> Compiled:
        """Made here, or read from the folder `cache`."""
        with TRACING:
            if cache is None:
                return self._made((self.question.args, self.question.kwargs), self.from_first).compiled
            folder = CacheFolder(Path(cache))
            return Reused(folder, self._make, self._maker_of_forms(), self.gather, self.from_first).answer(self.question)

    def _make(self, is_shared: bool) -> Made:
        return self._made((self.question.args, self.question.kwargs), self.from_first if is_shared else None)

    def _made(self, call: Call, from_first: FromFirst | None, plan: Plan | None = None) -> Made:
        known: Captures = {}

        def compile_by(options: Options) -> Compiled:
            return self.compile_by(call, options, from_first, known)

        def within(options: Options) -> Compiled:
            by_name = [replace(each, offload=options.offload) for each in self.by_name]
            return within_budget(options, compile_by, self.memory, by_name)

        options = self.question.options
        with outside_fake_modes():  # what we compute ourselves, masks and angles, has values
            if plan is not None:
                return Made(weighed(replace(options, plan=plan), compile_by, from_first), (*known.values(),))
            return Made(weighed(options, within, from_first), (*known.values(),))

    def _maker_of_forms(self) -> Callable[[Compiled], Forms]:
        """For a later time: by this rank alone, in what surrounds the call now. Of the batch nothing is kept."""
        model, call = self.question.model, without_values(self.question.args, self.question.kwargs)
        device = self.question.options.device if self.question.options.is_real else model_device(model).type
        was = Circumstances.of(model, device)
        unasked = replace(self, question=replace(self.question, args=(), kwargs={}))

        def forms(compiled: Compiled) -> Forms:
            with TRACING, was.restored(), global_parameters(model, torch.device(device)):
                found = unasked._made(call, None).compiled
                if found.fingerprint != compiled.fingerprint:  # a search may find another plan as good
                    found = unasked._made(call, None, compiled.plan).compiled
            return forms_of(found, compiled)

        return forms
