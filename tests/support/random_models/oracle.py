"""What `autopar.compile` makes of a random case, beside the original in plain torch."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

import autopar
from autopar.errors import CheckError, PeerError
from autopar.ir.keys import STRATEGY
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.random_models.cases import Case
from tests.support.random_models.steps import Seen, differences, rounding_decides, take_steps

# Of one case; the slowest takes some ten.
_MOST_SECONDS = 120
# Errors that speak of a broken program, or of ranks that wait for each other: whatever the model does, they are no refusals.
_OURS = (CheckError, PeerError)


class TakesTooLong(BaseException):
    """No `Exception`: whoever catches these goes on."""


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of

    exact     as plain torch to the model's tolerance
    refused   an `AutoparError`: allowed, and counted
    skipped   plain torch does not run it, or the last bits of its parameters decide what it computes
    wrong     other numbers, another error, or no end

    `split` is the share of the program's calls that ranks share, None of a mesh without dp and tp.
    """

    kind: str
    detail: str = ""
    split: float | None = None


@dataclass
class Tally:
    """How many cases came out how, and how much of the compiled programs is split."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    families: Counter[str] = field(default_factory=Counter[str])
    shares: list[float] = field(default_factory=list[float])

    def add(self, case: Case, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.families.update(set(case.model.families))
        if outcome.split is not None:
            self.shares.append(outcome.split)

    @property
    def exact(self) -> float:
        return self.kinds["exact"] / max(self.kinds.total(), 1)

    @property
    def split(self) -> float:
        return sum(self.shares) / max(len(self.shares), 1)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{self.kinds.total()} cases: {counts}; {self.split:.2f} of the calls split"


def outcome_of(case: Case) -> Outcome:
    torch.compiler.reset()  # of the case before, whose class Dynamo keeps
    try:
        wanted = take_steps(case.model.module(), case.model, case.steps)
    except Exception as error:  # whatever torch raises
        return Outcome("skipped", f"plain torch: {error}")
    try:
        with within(_MOST_SECONDS):
            parallel = compiled(case)
            got = take_steps(parallel, case.model, case.steps)
    except autopar.AutoparError as error:
        return Outcome("wrong" if isinstance(error, _OURS) else "refused", f"{type(error).__name__}: {error}")
    except TakesTooLong:
        return Outcome("wrong", f"no end within {_MOST_SECONDS} s")
    except Exception as error:
        return Outcome("wrong", "".join(traceback.format_exception(error)[-4:]))
    return _compared(case, wanted, got, share_split(parallel))


def _compared(case: Case, wanted: list[Seen], got: list[Seen], split: float | None) -> Outcome:
    found = differences(wanted, got, case.model.tolerance)
    if not found:
        return Outcome("exact", split=split)
    if rounding_decides(case.model, case.steps, wanted):
        return Outcome("skipped", "the last bits of the parameters decide what it computes")
    return Outcome("wrong", "\n".join(found))


def compiled(case: Case) -> ParallelModule:
    """At once, on the first batch."""
    torch.manual_seed(0)
    first = case.model.inputs_of(case.steps[0].values, case.steps[0].size)
    return autopar.compile(case.model.module(), autopar.virtual_mesh(**case.mesh), example_inputs=first, **case.options)


def share_split(parallel: ParallelModule) -> float | None:
    """Of the calls of the program, those whose work several ranks share. To compute everything everywhere is exact, too."""
    program = parallel.compiled.program
    if program.mesh.without("pp").size == 1:
        return None
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node in STRATEGY]
    return sum(STRATEGY[node].num_shards > 1 for node in calls) / max(len(calls), 1)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises `TakesTooLong`. By a signal, so in the main thread."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TakesTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
