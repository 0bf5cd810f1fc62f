"""What stands between attention's scores and its output, whoever computes it: a mask, ids of documents, dropout's draws, options.

`autopar/kernels/attention.py` says what each means. Every op of attention bundles its operands and options once, and hands them on whole.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypedDict

import torch
from torch import Tensor

from autopar.kernels.dropout import dropout_reference

Draws = tuple[Tensor, Tensor, Tensor]


class Options(TypedDict):
    """What the attention ops take besides tensors; `autopar/kernels/attention.py` says what each means."""

    is_causal: bool
    scale: float
    soft_cap: float
    window: int
    keep_below: int
    keep_scale: float
    implementation: str


@dataclass(frozen=True, eq=False)
class Masks:
    """Operands in the order of the ops, then their options. Nothing is checked here: `attention_checks.py` does."""

    mask: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    drop_rows: Tensor | None = None
    drop_second: Tensor | None = None
    drop_columns: Tensor | None = None
    _: KW_ONLY
    is_causal: bool
    scale: float
    soft_cap: float = 0.0
    window: int = 0
    keep_below: int = 0
    keep_scale: float = 1.0
    implementation: str = "triton"

    @property
    def has_documents(self) -> bool:
        return self.query_documents is not None

    @property
    def is_added(self) -> bool:
        """Whether the mask is a float that is added to scores."""
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def drops(self) -> bool:
        """Whether there is dropout, drawn or not yet."""
        return self.keep_below > 0

    def draws(self) -> Draws | None:
        """(rows, second, columns) that dropout is drawn from, if there is any and it is known."""
        if not self.drops or self.drop_rows is None or self.drop_second is None or self.drop_columns is None:
            return None
        return self.drop_rows, self.drop_second, self.drop_columns

    def same_document(self) -> Tensor | None:
        """bool [B, 1, S, T], true where s and t belong to one document; None where there are no documents."""
        if self.query_documents is None or self.key_documents is None:
            return None
        return (self.query_documents[:, :, None] == self.key_documents[:, None, :]).unsqueeze(1)

    def kept(self, probabilities: Tensor) -> Tensor | None:
        """What dropout multiplies `probabilities` [B, H, S, T] by, of their dtype: 0 or keep_scale; None without dropout."""
        draws = self.draws()
        if draws is None:
            return None
        ones = probabilities.new_ones(()).expand(probabilities.shape)
        return dropout_reference(ones, None, *draws, keep_below=self.keep_below, scale=self.keep_scale, dtype=probabilities.dtype)
