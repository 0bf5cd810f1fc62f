"""What errors may be, by the dtype that the model computes in and by how far its own rounding takes it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch


def own_tolerance(narrowest: torch.dtype) -> float:
    """What is asked for in the model's own precision: 1e-4, and eight roundings of the narrowest dtype that it computes in."""
    return max(1e-4, 8 * torch.finfo(narrowest).eps)


def floor_of(dtype: torch.dtype) -> float:
    """The share of the norm of all gradients below which a gradient is measured by that share instead of its own norm.

    A gradient that is zero by cancellation (the key bias of attention) is nothing but rounding on both sides. So is a buffer, measured by
    a share of all changed ones: the running mean of a batch norm of centred values. The floor is such that
    floor · tolerance is the rounding of one operation: 1e-6 · 1e-9 in float64, 1e-3 · 1e-4 in float32 and below.
    """
    return 1e-6 if dtype in (torch.float64, torch.complex128) else 1e-3


@dataclass(frozen=True)
class Limits:
    """What errors may be. `tolerance` is for all but gradients, and `gradients` for these.

    In a lower dtype a mask (of a relu, of a router's choice) flips where its operand is within a rounding of the threshold, in a share of
    about eps of the entries; a gradient that passes through is then sqrt(eps) off, in norm, whatever computes it. What that comes to is
    measured: `beside` the reference's own error against the original, twice that is allowed, of all gradients together or of this one
    (`by_gradient`): of many gradients only those behind a relu are off. How far the lower dtype may take the
    reference itself, `casts`, is four times sqrt(eps). `floor` is as of `floor_of`, of the dtype that rounds and not of
    the gradient's (T5 in float64 takes its softmax in float32): with `tolerance`, the rounding of one operation.
    """

    tolerance: float
    gradients: float
    floor: float
    casts: float = math.inf
    cast_loss_error: float = 0.0
    by_gradient: Mapping[str, float] = field(default_factory=dict[str, float])
    is_asked: bool = False

    @staticmethod
    def of(narrowest: torch.dtype, asked: float | None) -> Limits:
        """For a model that computes in `narrowest`; a tolerance that was `asked` for is that of all."""
        eps = torch.finfo(narrowest).eps
        own = own_tolerance(narrowest)
        chosen = own if asked is None else asked
        if narrowest.itemsize > 2:
            return Limits(chosen, chosen, floor_of(narrowest), is_asked=asked is not None)
        return Limits(chosen, chosen, eps / 2 / own, 4 * math.sqrt(eps), is_asked=asked is not None)

    @property
    def is_low(self) -> bool:
        return math.isfinite(self.casts)

    def beside(self, error: float, loss_error: float, errors: Mapping[str, float] | None = None) -> Limits:
        """Beside a reference whose gradients are together so far from the original's, and each by itself."""
        if self.is_asked:
            return replace(self, cast_loss_error=loss_error)
        gradients, *each = (min(2 * known(found), self.casts) for found in (error, *(errors or {}).values()))
        gradients = max(self.gradients, gradients)
        farther = {name: limit for name, limit in zip(errors or {}, each, strict=True) if limit > gradients}
        return replace(self, gradients=gradients, cast_loss_error=loss_error, by_gradient=farther)

    def beside_rounding(self, errors: Mapping[str, float], finer: float = 1.0, vanishing: Collection[str] = ()) -> Limits:
        """Beside an original of whose gradients each is so far from itself in a finer dtype, by its rounding alone.

        What goes through a batch norm of nearly equal rows, or cancels in a sum of many, the model amplifies, whatever computes it. Each
        may be off by four times that, of which it is one sample, and by a thousand times what is asked of all at most; by sixteen times
        that if it is `vanishing`, nothing but rounding: parts of the sum on several ranks are large, and round on their own. `finer`
        is by how much less is rounded where the comparison is in the finer dtype.
        """
        times = {name: finer * (64 if name in vanishing else 4) for name in errors}
        own = {name: min(times[name] * error, 1e3 * self.gradients) for name, error in errors.items() if math.isfinite(error)}
        return replace(self, by_gradient={name: limit for name, limit in own.items() if limit > self.gradients})

    def beside_other_roundings(self, samples: Sequence[Mapping[str, float]]) -> Limits:
        """Beside a reference of whose gradients each is so far from itself where its operations round otherwise, in each of some samples.

        A run that computes the same is another such sample: each gradient may be off by half as much again as the largest, but by no more
        than a gradient may be at all. So much rounding explains of the reference's own error, too; of more than a half nothing is proved.
        """
        if self.is_asked:
            return self
        largest = {name: 1.5 * max(known(sample.get(name, 0.0)) for sample in samples) for name in samples[0]}
        casts = max(self.casts, min(max(largest.values(), default=0.0), 0.5))
        own = {name: max(self.by_gradient.get(name, 0.0), min(limit, self.casts)) for name, limit in largest.items()}
        return replace(self, casts=casts, by_gradient={name: limit for name, limit in own.items() if limit > self.gradients})


def known(error: float) -> float:
    """NaN, which is no error at all, as infinity."""
    return math.inf if math.isnan(error) else error


def gradients_within(errors: Mapping[str, float], allowed: float, limits: Mapping[str, float]) -> bool:
    """Whether no gradient is farther off than is `allowed`, or than its own of the `limits`."""
    return all(known(error) <= max(allowed, limits.get(name, 0.0)) for name, error in errors.items())
