"""What a training step does besides the optimizer's own update, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autopar.errors import AutoparError
from autopar.ir.precision import MixedPrecision
from autopar.pipeline.weight_versions import VersionKind, WeightVersions

# What the update of one number depends on, besides the optimizer's settings: that number's own gradient and state, those of its
# parameter, or those of other parameters as well.
Scope = Literal["element", "parameter", "model"]


@dataclass(frozen=True)
class LossScale:
    """Dynamic scaling of the loss, for gradients in float16; torch's `GradScaler` has the same numbers.

    Gradients are those of the loss times the scale, and are divided by it before they are used. Where one is not finite the step is
    skipped and the scale multiplied by `backoff_factor`; after `growth_interval` steps in a row that were not, by `growth_factor`.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not (self.initial > 0 and self.growth_factor >= 1 and 0 < self.backoff_factor <= 1 and self.growth_interval >= 1):
            raise AutoparError(f"{self}: use initial > 0, growth_factor >= 1, 0 < backoff_factor <= 1, growth_interval >= 1")


@dataclass(frozen=True)
class TrainStep:
    """Options of `parallel.train_step`.

    clip_grad_norm  the joint 2-norm that all gradients have at most, over all axes and stages
    accumulate      the optimizer steps at every k-th call, by the mean of the gradients of k calls
    non_finite      what is done where the loss or a gradient is infinite or NaN: "raise" a `NonFiniteError` that names parameters, and
                    where such a value first appeared: the node with its source line, ranks, microbatch; or "skip" the update, which
                    is logged, the first time with that place. None looks at nothing. All ranks do the same
    loss_scale      scales the loss, see `LossScale`; steps whose gradients are not finite are skipped. Where precision= or a
                    torch.autocast computes in float16 `LossScale()` where it is left out. With it `non_finite` is about the loss,
                    which no scale mends
    ema             keeps an exponential moving average of all parameters, trained or not, `parallel.ema`, as torch's `AveragedModel`
                    does: ema · average + (1 - ema) · parameter after every step, beginning with the parameters after the first. A call
                    that only accumulates, or is skipped, is no step
    update_scope    what the optimizer's update of one number depends on: "element", that number's own gradient and state; "parameter",
                    those of its parameter; "model", others', too. Known of the optimizers of torch.optim; of others "model" is
                    assumed, with which all are updated together at the end. With the other two a step is made in parts: what it counts
                    it must keep in the state of each parameter
    weight_versions a pipeline updates within the call and does not wait for itself: gradients are those of weights that are a few
                    updates old. "stash", PipeDream's: a forward takes the newest weights of its stage, its backward the same; "2bw",
                    PipeDream-2BW's: every gradient is one update old. It is another training, and faster for calls of as many
                    microbatches as you like; at the end of a call the pipeline is empty, and the next begins with all updates done
    update_every    with it, how many microbatches make an update, by the mean of their gradients: by default one with "stash", as many
                    as there are stages with "2bw". A microbatch counts by its part in the loss of the call: of equal ones, which all
                    have as many labels, that is the loss of its own

    Raises `AutoparError` for values that it cannot have.
    """

    clip_grad_norm: float | None = None
    accumulate: int = 1
    non_finite: Literal["raise", "skip"] | None = None
    loss_scale: LossScale | None = None
    ema: float | None = None
    update_scope: Scope | None = None
    weight_versions: VersionKind | None = None
    update_every: int | None = None

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise AutoparError(f"clip_grad_norm={self.clip_grad_norm} leaves no gradient; use a number above 0, or None for no clipping")
        if self.accumulate < 1:
            raise AutoparError(f"accumulate={self.accumulate} calls make no step; use 1 or more")
        if self.non_finite not in (None, "raise", "skip"):
            raise AutoparError(f'non_finite={self.non_finite!r} is unknown; use "raise", "skip" or None')
        if self.ema is not None and not 0 <= self.ema < 1:
            raise AutoparError(f"ema={self.ema} is no decay; use one from 0 to below 1, such as 0.999")
        if self.update_scope not in (None, "element", "parameter", "model"):
            raise AutoparError(f'update_scope={self.update_scope!r} is unknown; use "element", "parameter" or "model"')
        self._check_versions()

    def _check_versions(self) -> None:
        if self.weight_versions not in (None, "stash", "2bw"):
            raise AutoparError(f'weight_versions={self.weight_versions!r} is unknown; use "stash", "2bw" or None')
        if self.update_every is not None and (self.weight_versions is None or self.update_every < 1):
            raise AutoparError(f"update_every={self.update_every} is a number of microbatches, 1 or more, for weight_versions")
        if self.weight_versions is not None and (self.agrees_first or self.accumulate > 1 or self.ema is not None):
            raise AutoparError(
                f"weight_versions={self.weight_versions!r} updates while other microbatches are under way, before anything can be agreed "
                "upon: leave out clip_grad_norm, non_finite, loss_scale, accumulate (say update_every) and ema"
            )

    @property
    def versions(self) -> WeightVersions | None:
        return None if self.weight_versions is None else WeightVersions(self.weight_versions, self.update_every)

    def scaled_for(self, precision: MixedPrecision | None) -> TrainStep:
        """With a scale where `precision` needs one and none was given."""
        is_missing = precision is not None and precision.needs_scale and self.loss_scale is None
        return replace(self, loss_scale=LossScale()) if is_missing else self

    @property
    def agrees_first(self) -> bool:
        """Whether ranks must agree on something about all gradients before any of them updates."""
        return self.clip_grad_norm is not None or self.non_finite is not None or self.loss_scale is not None
