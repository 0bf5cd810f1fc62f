"""Determinants of real matrices by their LU factors, for the joint trace.

torch's own kernel factors the matrix or its transpose by how that lies in memory, and its backward trusts that it lies as it did when it
was traced. A rank's part need not, nor what a compiler lays out anew. These take A = P·L·U in both directions:

    det A = sign(P) · Π u_ii          gradient g · det A · A⁻ᵀ
    log |det A| = Σ log |u_ii|        gradient g · A⁻ᵀ

A⁻ᵀ solves with the factors once more. Of a singular matrix zeros on U's diagonal are taken for the smallest step from 1, as torch does of
det: a matrix of zeros, which a padded sample is, has no gradient where none comes in.
"""

from __future__ import annotations

from typing import Any

import torch

# What torch factors; of complex matrices its kernel takes no transpose.
_REAL = (torch.float32, torch.float64)


class _Det(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        factors, pivots, diagonal, sign = _factored(matrix)
        det = sign * diagonal.prod(-1)
        ctx.save_for_backward(factors, pivots, det)
        return det

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        factors, pivots, det = ctx.saved_tensors
        return _inverse_transposed(factors, pivots, gradients[0] * det)


class _LogAbsDet(torch.autograd.Function):
    """The sign of the determinant, which is constant, and the logarithm of what it is without that."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors, pivots, diagonal, sign = _factored(matrix)
        sign = sign * diagonal.sign().prod(-1)
        ctx.save_for_backward(factors, pivots)
        ctx.mark_non_differentiable(sign)
        return sign, diagonal.abs().log().sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        factors, pivots = ctx.saved_tensors
        return _inverse_transposed(factors, pivots, gradients[1])


def _factored(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """L and U in one, the rows exchanged, the diagonal of U, and the sign of all exchanges."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    places = torch.arange(1, matrix.shape[-1] + 1, dtype=pivots.dtype, device=matrix.device)
    is_odd = (pivots != places).sum(-1) % 2
    return factors, pivots, factors.diagonal(0, -2, -1), 1 - 2 * is_odd.to(matrix.dtype)


def _inverse_transposed(factors: torch.Tensor, pivots: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    diagonal = factors.diagonal(0, -2, -1)
    filled = torch.where(diagonal == 0, torch.finfo(factors.dtype).eps, 0.0)
    wanted = torch.diag_embed(scale[..., None].expand(diagonal.shape))
    return torch.linalg.lu_solve(factors + torch.diag_embed(filled), pivots, wanted, adjoint=True)


def det(matrix: torch.Tensor) -> torch.Tensor:
    """`torch.linalg.det`."""
    return _Det.apply(matrix) if matrix.dtype in _REAL else torch.linalg.det(matrix)


def slogdet(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.linalg.slogdet`."""
    return _LogAbsDet.apply(matrix) if matrix.dtype in _REAL else tuple(torch.linalg.slogdet(matrix))


def logdet(matrix: torch.Tensor) -> torch.Tensor:
    """`torch.logdet`: NaN where the determinant is negative."""
    if matrix.dtype not in _REAL:
        return torch.logdet(matrix)
    sign, logarithm = slogdet(matrix)
    return torch.where(sign == -1.0, torch.nan, logarithm)
