"""Errors for the user's mistakes. `assert` is for our own invariants."""

from __future__ import annotations


class AutoparError(ValueError):
    """What is wrong, both values, where in the user's source, and how to mend it. `is_told`: every rank raises this one."""

    is_told = False


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class ModelError(CaptureError, TypeError):
    """What is to be compiled is no model: a function, a class, something that wraps a model, or one that is split already."""


class MeshError(AutoparError):
    """The mesh does not fit the world, the batch or the call."""


class PlanError(AutoparError):
    """A pin or a plan cannot be kept on this graph and mesh."""


class UnmatchedPinError(PlanError):
    """A pin names no parameter and no module of the model: a slip of the pen, as a rule."""


class MicrobatchError(PlanError):
    """This number of microbatches would change what the model computes; says where, and the ways out.

    `found` are those places, for a compile that may choose another number.
    """

    def __init__(self, text: str, found: tuple[object, ...] = ()) -> None:
        super().__init__(text)
        self.found = found


class MemoryBudgetError(PlanError):
    """No plan fits into the memory of a rank; says what conflicts and what would help.

    `least_bytes` is what no plan takes less than, where that is known: less than what any plan may need.
    """

    def __init__(self, message: str, least_bytes: float | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class WeightsError(AutoparError):
    """A model cannot be given values: a tensor without an initialiser, files with other names, shapes or dtypes."""


class InputError(AutoparError):
    """A call's inputs do not fit: device, batch size, or replicas that differ."""


class ArgumentError(InputError, TypeError):
    """A call passes other arguments than forward takes."""


class ValueCheckError(AutoparError, AssertionError):
    """What the model, or a function of torch that it calls, asserts of values does not hold in this call."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written or read, is damaged, or is not of this model; names the file or what differs."""


class NonFiniteError(AutoparError, ArithmeticError):
    """A gradient is infinite or NaN; names parameters."""


class CheckError(AutoparError):
    """A program broke an invariant after a pass; lists every violation found."""


class ScheduleError(AutoparError):
    """A schedule cannot run: a deadlock, an unmatched collective, a buffer misused."""


class OffloadError(AutoparError):
    """What was moved to host memory or to a file cannot be kept there, or came back damaged; names the buffer."""


class PeerError(AutoparError, RuntimeError):
    """A rank that this one waited for is gone or late; names this rank, the instruction and the other ranks."""


class BackwardError(AutoparError, RuntimeError):
    """A backward that no call of a parallel module can run: a second one, one to be differentiated, one through a detached output."""
