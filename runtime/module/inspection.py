"""What a parallel module says of its latest program."""

from __future__ import annotations

from typing import Any

import autopar.reports.inspect
from autopar.driver.compiled import Compiled
from autopar.errors import MeshError
from autopar.plans.plan import Plan
from autopar.plans.styles import UserPins
from autopar.reports.entries import Summary
from autopar.reports.what_if import WhatIf
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.verify.report import Report
from autopar.runtime.verify.timeline import Timeline, timeline
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

    def explain(self) -> str:
        """The decisions with their reasons, the cost split and the runner-up, as text."""
        return autopar.reports.inspect.explain(self.compiled)

    def summary(self) -> Summary:
        """What `explain` says, as a JSON-able dict."""
        return autopar.reports.inspect.summary(self.compiled)

    def why(self, pattern: str) -> str:
        """Why parameters, modules and ops that match `pattern` are split as they are, what that costs, and what else was possible."""
        return autopar.reports.inspect.why(self.compiled, pattern)

    def what_if(self, pins: UserPins | Plan | None) -> WhatIf:
        """What the latest program would cost with these pins in place of those given to `compile`; a value that prints. Nothing changes."""
        return autopar.reports.inspect.what_if(self.compiled, pins)

    def print_program(self, after: str | None = None, rank: int = 0) -> str:
        """The program after pass `after`, or what `rank` runs."""
        return autopar.reports.inspect.print_program(self.compiled, after=after, rank=rank)

    def diff(self, before: str, after: str) -> str:
        """How the program differs between after pass `before` and after pass `after`."""
        return autopar.reports.inspect.diff(self.compiled, before, after)

    def timeline(self, *args: Any, **kwargs: Any) -> Timeline:
        """Run one step on these inputs and measure it: a value that prints, and writes a trace beside the predicted one.

        Nothing changes: no gradient is kept, no buffer written. Collective.
        """
        return timeline(self, args, kwargs)

    def verify(self, *args: Any, promote: bool = False, tolerance: float | None = None, **kwargs: Any) -> Report:
        """Run original and rewritten program side by side on these inputs; the report is truthy when they agree.

        `promote` does it in float64 and asks for 1e-9, else 1e-4 is asked for (6e-2 of bfloat16, 8e-3 of float16), or `tolerance`.
        """
        return verify(self, args, kwargs, promote, tolerance)
