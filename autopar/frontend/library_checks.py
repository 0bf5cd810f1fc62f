"""Checks of values inside PyTorch's own functions: assumed to hold while a model is traced, and asserted when the program runs.

`torch.distributions` checks that every scale is positive, `gaussian_nll_loss` that every variance is, `istft` that windows overlap. No
branch of the model depends on the answer, so a trace need not stop there. While `library_checks_asserted` is entered, these functions are
replaced by versions that call `holds(...)` in place of `if not ...: raise`; `autopar.frontend.value_checks` turns these calls into outputs
of the program.

Left as they are, so that a model which calls them is still refused: sampling by rejection (`VonMises.sample`), `Wishart`,
the divergence of two binomials, tensors' own methods (`x.cov()`: write `torch.cov(x)`), and a function that was taken out of its
module before (`from torch.nn.functional import gaussian_nll_loss`: write `F.gaussian_nll_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from autopar._torch import (
    ARE_ALL_TRUE,
    CAUSAL_MASK_DETECTION,
    DEPENDENT_CONSTRAINT,
    DISTRIBUTIONS_CHECKED,
    MATRIX_CONSTRAINTS,
    NORM_OF_BATCH,
    attributes_replaced,
)

_gaussian_nll_loss, _cov, _corrcoef, _bincount, _istft = F.gaussian_nll_loss, torch.cov, torch.corrcoef, torch.bincount, torch.istft


@contextmanager
def library_checks_asserted() -> Generator[None]:
    """While this is entered, a trace goes past the checks of values that torch's functions make, and has them as assertions."""
    symmetric, semidefinite, definite = MATRIX_CONSTRAINTS
    replaced: list[tuple[Any, str, Any]] = [
        *((*each, _all_hold) for each in ARE_ALL_TRUE),
        # torch's own default. The first `torch.compile` of a process turns it off for good, and a later capture would lose its checks.
        (*DISTRIBUTIONS_CHECKED, __debug__),
        (constraints, "is_dependent", _is_dependent),
        (*CAUSAL_MASK_DETECTION, _is_said_to_be_causal),
        (NORM_OF_BATCH, "forward", _batch_norm(NORM_OF_BATCH.forward)),
        (symmetric, "check", _is_symmetric),
        (semidefinite, "check", _is_semidefinite),
        (definite, "check", _is_definite),
        (F, "gaussian_nll_loss", _gaussian_loss),
        (torch, "cov", _covariance),
        (torch, "corrcoef", _correlation),
        (torch, "bincount", _counts),
        (torch, "istft", _inverse_stft),
    ]
    with attributes_replaced(replaced):
        yield


def holds(valid: Tensor, message: str) -> None:
    """Assert that all of `valid`, booleans, are true. As a sum: ranks count what they hold, and one number a check is reduced."""
    torch.ops.aten._assert_async.msg(torch.logical_not(valid).sum() == 0, message)


def _all_hold(valid: Tensor, message: str = "") -> bool:
    holds(valid, "torch.distributions: a parameter or a value is outside of what the distribution takes")
    return True


def _is_dependent(constraint: Any) -> bool:
    return isinstance(constraint, DEPENDENT_CONSTRAINT)


def _is_said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Without a look at the mask, which is used as it is then: the same numbers."""
    return is_causal is True


def _is_symmetric(self: Any, value: Tensor) -> Tensor:
    if value.shape[-2] != value.shape[-1]:
        return torch.full(value.shape[:-2], False, device=value.device)
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def _is_semidefinite(self: Any, value: Tensor) -> Tensor:
    return _is_symmetric(self, value) & torch.linalg.eigvalsh(value).ge(0).all(-1)


def _is_definite(self: Any, value: Tensor) -> Tensor:
    return _is_symmetric(self, value) & torch.linalg.cholesky_ex(value).info.eq(0)


def _gaussian_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, line by line, but for the check."""
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return _gaussian_nll_loss(input, target, var, full, eps, reduction)
    holds(var >= 0, "gaussian_nll_loss: var has negative entry/entries")
    differing = [given for given, wanted in zip(var.size(), input.size(), strict=False) if given != wanted]
    if var.size() == input.size()[:-1]:
        var = var.unsqueeze(-1)
    elif var.ndim != input.ndim or differing not in ([], [1]):
        raise ValueError(f"gaussian_nll_loss: var {list(var.size())} is of incorrect size for input {list(input.size())}")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _batch_norm(original: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """With momentum=None the running statistics are means over all batches so far: the count is read by ops, not as a number."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or not self.track_running_stats:
            return original(self, input)
        self._check_input_dim(input)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        out = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / self.num_batches_tracked.double()
            self.running_mean.copy_((1 - share) * self.running_mean + share * mean)
            self.running_var.copy_((1 - share) * self.running_var + share * var)
        return out

    return forward


def _covariance(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    if fweights is not None or aweights is not None:
        return _cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mT.conj() / max(rows.shape[1] - correction, 0)).squeeze()


def _correlation(input: Tensor) -> Tensor:
    if input.is_complex():
        return _corrcoef(input)
    covariance = _covariance(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations[:, None] / deviations[None, :]).clip(-1, 1)


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many counts as `minlength` says, as long as no value is larger, which is asserted."""
    if minlength == 0:
        return _bincount(input, weights, minlength)
    holds((input >= 0) & (input < minlength), f"bincount: a value is negative, or not below minlength={minlength}")
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return torch.zeros(minlength, dtype=weights.dtype, device=input.device).index_add(0, input.long().clamp(0, minlength - 1), weights)


def _inverse_stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """`torch.istft` of [*batch, frequencies, frames], but for its check that windows overlap everywhere: frames are weighted and added up.

    What torch refuses is left to torch, and so are complex results.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    num_frames = input.shape[-1]
    first, end = n_fft // 2 if center else 0, n_fft + hop * (num_frames - 1)
    last = end - first if length is None else first + length
    is_half = input.shape[-2:-1] == (n_fft // 2 + 1,) and onesided is not False
    is_whole = input.shape[-2:-1] == (n_fft,) and not onesided
    is_window = window is None or (window.shape == (width,) and window.is_floating_point())
    is_legal = input.is_complex() and input.ndim in (2, 3) and 0 < hop <= width <= n_fft and last > first and (is_half or is_whole)
    if return_complex or not is_legal or not is_window:
        return _istft(input, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex)
    if window is None:
        window = torch.ones(width, dtype=input.real.dtype, device=input.device)
    window = F.pad(window, [(n_fft - width) // 2, n_fft - width - (n_fft - width) // 2])
    spectra = input.mT[..., : n_fft // 2 + 1] if input.ndim == 3 else input.mT[None, :, : n_fft // 2 + 1]
    frames = torch.fft.irfft(spectra, n_fft, norm="ortho" if normalized else "backward") * window
    added, weights = (
        F.fold(each.mT, (1, end), (1, n_fft), stride=(1, hop))[:, 0, 0] for each in (frames, window.square().expand(1, num_frames, n_fft))
    )
    weights = weights[:, first:last]
    holds(weights.abs() > 1e-11, "istft: windows do not overlap everywhere")
    found = F.pad(added[:, first:last] / weights, [0, max(last - end, 0)])
    return found if input.ndim == 3 else found[0]
