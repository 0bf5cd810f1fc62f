"""What `verify` found, and how far apart two values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from autopar.runtime.verify.limits import gradients_within, known

Reference = Literal["original model", "forward program"]

# Stands for minus infinity in masks; it would drown every other entry of a norm.
_MASKED = 1e30


@dataclass(frozen=True)
class Difference:
    """The first value, in the order of the program, that differs.

    node     its name in the program where it differs; a result's name where no node was told apart
    source   the user's file, line and module
    made_by  the pass that made the difference; "runtime" when every program agrees and the real run does not
    error    relative, see `error_of`; or between ranks that should hold the same
    detail   which ranks, or which operand of the comparison, where that is known
    """

    node: str
    source: str
    made_by: str
    error: float
    detail: str = ""

    def __str__(self) -> str:
        place = f", {self.source}" if self.source else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"%{self.node}{place}: off by {self.error:.3g}{detail}, made by {self.made_by}"


@dataclass(frozen=True)
class PaddingChange:
    """How far the model is, on a batch of length `own` that is made `padded` long, from itself on the batch: the largest error, and of
    what it is."""

    own: int
    padded: int
    error: float
    of: str

    @property
    def worst(self) -> float:
        """The error; NaN as infinity."""
        return known(self.error)

    def lines(self, is_within: bool) -> list[str]:
        what = f"the batch is padded from length {self.own} to {self.padded}, and the model "
        if is_within:
            return [f"  ({what}gives the same for both: worst error {self.error:.3g}; other errors are on the padded batch)"]
        return [
            f"  {what}GIVES ANOTHER {self.of} for it, off by {self.error:.3g}: a mask, or labels that the loss ignores,",
            "  must keep what is padded out of it; check the values of pad_to=, or leave it out",
        ]


@dataclass(frozen=True)
class Report:
    """Errors are the largest over all programs between the reference and the module's own run; truthy when all are within `tolerance`.

    gradient_errors  per parameter ‖a − b‖ / max(‖b‖, floor · ‖all gradients‖), see `floor_of`
    buffer_errors    per buffer that the model changes, likewise a share of all of those that hold floats
    replica_errors   per result the largest difference between ranks that should hold the same part
    narrowest        the dtype of fewest digits that the model computes in, where it is not promoted
    num_detached     outputs of which a pipeline gives the values alone: the gradients compared are those of the loss
    own_statistics_error  where each microbatch takes its own statistics, the largest error of the module's own run, buffers aside, against
                     the program that does so, run side by side; None elsewhere. The other errors are those against the original
    is_random        whether the model draws random numbers
    gradient_tolerance  what gradients may be off; in a lower dtype twice what that takes them all together from the original, if more
    gradient_limits  of those that rounding takes farther by themselves, in float32 too, what each may be off
    cast_error       in a lower dtype the largest error of the reference against the original in float64; judged by `cast_tolerance`
    cast_loss_error  that of its loss and outputs, judged by `tolerance`
    padding          of a batch that `pad_to` made longer, what that changes; None of others. The other errors are on the longer batch
    without_numbers  outputs and gradients of the reference that hold no finite number: that others are as NaN as they are proves nothing
    has_numbers      whether any output of the reference holds one, or all of its gradients do
    """

    loss_error: float
    gradient_errors: Mapping[str, float]
    tolerance: float
    reference: Reference = "original model"
    promoted: bool = False
    buffer_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    replica_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    first_difference: Difference | None = None
    narrowest: torch.dtype = torch.float32
    num_detached: int = 0
    own_statistics_error: float | None = None
    is_random: bool = False
    gradient_tolerance: float = 0.0
    gradient_limits: Mapping[str, float] = field(default_factory=dict[str, float])
    cast_error: float | None = None
    cast_tolerance: float = math.inf
    cast_loss_error: float = 0.0
    padding: PaddingChange | None = None
    without_numbers: tuple[str, ...] = ()
    has_numbers: bool = True

    def __bool__(self) -> bool:
        return self.are_all_within and self.has_numbers

    @property
    def are_all_within(self) -> bool:
        """Whether no error is larger than it may be."""
        rest = replace(self, gradient_errors={}).worst
        allowed = max(self.tolerance, self.gradient_tolerance)
        are_within = rest <= self.tolerance and gradients_within(self.gradient_errors, allowed, self.gradient_limits)
        return self.first_difference is None and are_within and self.are_casts_within and self.is_padding_within

    @property
    def are_casts_within(self) -> bool:
        """Whether the lower dtype takes the program no farther from the original than its rounding explains."""
        return self.cast_error is None or (known(self.cast_error) <= self.cast_tolerance and known(self.cast_loss_error) <= self.tolerance)

    @property
    def is_padding_within(self) -> bool:
        """Whether the model gives for the padded batch what it gives for the batch."""
        return self.padding is None or self.padding.worst <= max(self.tolerance, self.gradient_tolerance)

    @property
    def worst(self) -> float:
        """The largest of all errors; NaN (which is no error at all) as infinity."""
        tables = (self.gradient_errors, self.buffer_errors, self.replica_errors)
        return max(map(known, [self.loss_error, *(error for table in tables for error in table.values())]))

    def __str__(self) -> str:
        verdict = "NOT EQUAL" if not self.are_all_within else "equal" if self.has_numbers else "NOTHING PROVED: equal"
        is_rounded = not self.promoted and self.narrowest not in (torch.float32, torch.float64)
        name = str(self.narrowest).removeprefix("torch.")
        how = "promoted to float64" if self.promoted else "in the model's own precision" + (f", {name} in part" if is_rounded else "")
        lines = [f"{verdict} to the {self.reference}, {how}: worst error {self.worst:.3g}, tolerance {self.tolerance:g}"]
        if self.gradient_tolerance > self.tolerance:
            lines[0] += f", {self.gradient_tolerance:.3g} for gradients"
        if self.without_numbers:
            first, more = ", ".join(self.without_numbers[:3]), len(self.without_numbers) - 3
            names = first + (f" and {more} more" if more > 0 else "")
            lines.append(f"  (of the {self.reference} nothing is finite on this batch in {names}: equal there is no proof)")
        lines += self._about_reference()
        if self.cast_error is not None:
            eps = torch.finfo(self.narrowest).eps
            lines.append(
                f"  {name} takes that program off the original by {self.cast_error:.3g}, {self.cast_error / eps:.3g} eps of {name}, where "
                f"{self.cast_tolerance / eps:.3g} {'are allowed' if self.are_casts_within else 'are all that rounding explains'}; its loss "
                f"by {self.cast_loss_error:.3g}; promote=True compares without casts"
            )
        lines += self._about_rounding()
        if self.num_detached:
            outputs = f"{self.num_detached} other output{'s' if self.num_detached > 1 else ''}"
            lines.append(f"  (gradients are those of the loss alone: a pipeline refuses a backward through {outputs}, compared by value)")
        if is_rounded and not self.are_all_within:
            rounding = torch.finfo(self.narrowest).eps
            lines.append(f"  ({name} rounds by up to {rounding:.2g}, and more of a sum that cancels: promote=True compares without)")
        if self.own_statistics_error is not None:
            lines.append('  each microbatch takes its own statistics, as microbatch_statistics="own" accepts: another computation')
            lines.append(f"  against the program that does so: worst error {self.own_statistics_error:.3g}")
        if self.padding is not None:
            lines += self.padding.lines(self.is_padding_within)
        if self.first_difference is not None:
            lines.append(f"  first difference: {self.first_difference}")
        lines.append(f"  loss: {self.loss_error:.3g}")
        for title, table in (("gradient", self.gradient_errors), ("buffer", self.buffer_errors), ("between replicas", self.replica_errors)):
            lines += _worst_five(title, table)
        return "\n".join(lines)

    def _about_rounding(self) -> list[str]:
        allowed = max(self.tolerance, self.gradient_tolerance)
        farther = {name: limit for name, limit in self.gradient_limits.items() if known(self.gradient_errors.get(name, 0.0)) > allowed}
        if not farther:
            return []
        name, limit = max(farther.items(), key=lambda entry: self.gradient_errors[entry[0]])
        many = f"{len(farther)} gradients are" if len(farther) > 1 else "1 gradient is"
        return [f"  ({many} farther off than {allowed:.3g}, as rounding takes the original's own: up to {limit:.3g} is allowed of {name})"]

    def _about_reference(self) -> list[str]:
        if self.is_random:
            return [
                "  (it draws random numbers, keyed by position, not eager's: compared with the program as it was captured, on one device)"
            ]
        if self.reference == "forward program":
            return ["  (compared with the program as it was captured, with its casts and nothing else rewritten, on one device)"]
        return []


def _worst_five(title: str, table: Mapping[str, float]) -> list[str]:
    worst = sorted(table.items(), key=lambda entry: -entry[1])[:5]
    return [f"  {title} {name}: {error:.3g}" for name, error in worst if error > 0 or title == "gradient"]


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of the entries that are numbers and no mask; 0 for one without float entries."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    plain = _plain_norm(tensor)
    if plain is not None:
        return plain
    wide = _wide(tensor)
    return float(torch.linalg.vector_norm(wide[wide.abs() < _MASKED]))


def _plain_norm(tensor: torch.Tensor) -> float | None:
    """The Euclidean norm, summed in float64, of a tensor that holds neither masks nor what is no number; None where it may hold some.

    One pass over the memory, and nearly every tensor is such a one: comparing whole programs takes a third of the time.
    """
    found = float(torch.linalg.vector_norm(tensor, dtype=_wide_dtype(tensor)).real)
    return found if found < _MASKED else None


def error_of(value: torch.Tensor | None, wanted: torch.Tensor | None, floor: float = 0.0) -> float:
    """‖value − wanted‖ / max(‖wanted‖, floor); for integers and bools the share of entries that differ.

    NaNs, infinities and masks are compared by themselves: one that has no equal makes the error infinite.
    None stands for zeros (a gradient that is not computed).
    """
    value = torch.zeros_like(wanted) if value is None and wanted is not None else value
    wanted = torch.zeros_like(value) if wanted is None and value is not None else wanted
    if value is None or wanted is None:
        return 0.0
    if value.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float((value != wanted).double().mean())
    known = _plain_norm(wanted) if _plain_norm(value) is not None else None
    if known is not None:
        # Nearly equal numbers are subtracted without rounding; narrow dtypes and unequal ones are widened before.
        is_exact = value.dtype == wanted.dtype and wanted.dtype.itemsize >= 4
        gap = norm(value - wanted if is_exact else _wide(value) - _wide(wanted))
        return _relative(gap, max(known, floor))
    a, b = _wide(value), _wide(wanted)
    # A mask's number may itself be rounded on the way, to float32 and back.
    same = (a == b) | (a.isnan() & b.isnan()) | (((a - b).abs() <= 1e-6 * b.abs()) & (b.abs() >= _MASKED) & b.isfinite())
    plain = (a.abs() < _MASKED) & (b.abs() < _MASKED)
    if not bool((same | plain).all()):
        return math.inf
    gap = float(torch.linalg.vector_norm((a - b)[plain]))
    return _relative(gap, max(float(torch.linalg.vector_norm(b[plain])), floor))


def _relative(gap: float, scale: float) -> float:
    return (gap / scale if scale else math.inf) if gap else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_dtype(tensor))


def _wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
