"""What a parallel module says of its latest program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import autopar.reports.inspect
from autopar.driver.compiled import Compiled
from autopar.errors import MeshError
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins
from autopar.reports.entries import Summary
from autopar.reports.formulas import Formulas, formulas
from autopar.reports.memory import Memory, capacity_of, memory_of
from autopar.reports.prompt_text import PromptText
from autopar.reports.what_if import WhatIf
from autopar.runtime.execute.call import made_in_inference_mode, outside_inference_mode
from autopar.runtime.execute.fragments import rank_sizes
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.verify.profile import Profile, profile
from autopar.runtime.verify.report import Report
from autopar.runtime.verify.timeline import Timeline, timeline
from autopar.runtime.verify.tracked_memory import measured_peaks
from autopar.runtime.verify.verify import verify


class Inspected(ModuleState):
    """A module with a latest program; each question is answered by `autopar.reports`, `runtime.timeline` or `runtime.verify`."""

    @property
    def compiled(self) -> Compiled:
        """The program of the latest call or `prepare`."""
        if self._latest is None:
            raise MeshError("nothing is captured yet: pass example_inputs to autopar.compile, or call the module once")
        return self._latest

    @property
    def plan(self) -> Plan:
        """The decisions of the latest call."""
        assert self.compiled.plan is not None, "autopar.compile makes one"
        return self.compiled.plan

    def explain(self, pattern: str | None = None, *, detail: str | None = None) -> PromptText:
        """What was split, how and why, what a step costs, what limits it and what to try, on one screen.

        With a pattern of names (`"model.layers.*"`) what was decided of each parameter and contraction that it names; with `detail`
        one section of the whole report ("parameters", "contractions", "communication", …), or all of it ("all").
        """
        return PromptText(autopar.reports.inspect.explain(self.compiled, pattern, detail, self._world.is_virtual))

    def summary(self) -> Summary:
        """What `explain` says, as a JSON-able dict."""
        return autopar.reports.inspect.summary(self.compiled)

    def memory(self, measure: Mapping[str, Any] | tuple[Any, ...] | None = None) -> Memory:
        """What a rank will hold in a step, instruction by instruction, before anything runs: a value that prints, says whether it `fits`
        into the budget (else into a device of the cluster), and saves a picture of the curve (`.save("memory.svg")`).

        Bytes are those of ranks that are processes, on a virtual mesh, too; of Adam's state where no optimizer is named. With a batch to
        `measure` forward and backward run once, nothing is changed by it, and what the allocator says stands beside. Collective then.
        """
        sizes = rank_sizes(self.compiled, self._backend, self._model)
        found = memory_of(self.compiled, sizes, *capacity_of(self.compiled))
        if measure is None:
            return found
        inputs = CallInputs.of(*(((), dict(measure)) if isinstance(measure, Mapping) else (tuple(measure), {})))
        return replace(found, measured=measured_peaks(self, *inputs.call()))

    def formulas(self) -> Formulas:
        """Saved bytes, parameter bytes and FLOPs as formulas in b, s, h, …, a value that prints."""
        return formulas(self.compiled.program)

    def why(self, pattern: str) -> PromptText:
        """Why parameters, modules and ops that match `pattern` are split as they are, what that costs, and what else was possible."""
        return PromptText(autopar.reports.inspect.why(self.compiled, pattern))

    def what_if(self, pins: UserPins | Plan | None) -> WhatIf:
        """What the latest program would cost with these pins in place of those given to `compile`; a value that prints. Nothing changes."""
        return autopar.reports.inspect.what_if(self.compiled, pins)

    def print_program(self, after: str | None = None, rank: int = 0, module: str | None = None) -> PromptText:
        """The program after pass `after`, or what `rank` runs; of `module` and the modules in it alone, where one is named."""
        return PromptText(autopar.reports.inspect.print_program(self.compiled, after=after, rank=rank, module=module))

    def diff(self, before: str, after: str, module: str | None = None) -> PromptText:
        """How the program differs between after pass `before` and after pass `after`; of `module` alone, where one is named."""
        return PromptText(autopar.reports.inspect.diff(self.compiled, before, after, module))

    def timeline(self, *args: Any, **kwargs: Any) -> Timeline:
        """Run one step on these inputs and measure it: a value that prints, and writes a trace beside the predicted one.

        Nothing changes: no gradient is kept, no buffer written. Collective.
        """
        return timeline(self, args, kwargs)

    def profile(self, *args: Any, steps: int = 3, **kwargs: Any) -> Profile:
        """Run some steps on these inputs, measure every instruction, and set it beside the cost model: what is exposed, what idles, the
        slowest fragments, and how far the model is off. A value that prints, writes a trace, and corrects the prices of the next plan
        (`autopar.calibrate(profile=...)`). Nothing changes. Collective.

        Raises `AutoparError` for less than one step.
        """
        return profile(self, args, kwargs, steps)

    def verify(self, *args: Any, promote: bool = False, tolerance: float | None = None, **kwargs: Any) -> Report:
        """Run original and rewritten program side by side on these inputs; the report is truthy when they agree.

        `promote` does it in float64 and asks for 1e-9, else 1e-4 is asked for (6e-2 of bfloat16, 8e-3 of float16), or `tolerance`.
        """
        with outside_inference_mode(unless=made_in_inference_mode(self._model)):
            return verify(self, args, kwargs, promote, tolerance)
