"""Lengths that calls are padded to, so that batches of many lengths share a few programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import InputError


@dataclass(frozen=True)
class PadTo:
    """Calls run at a few lengths: inputs are made longer at their end, outputs cut to what the batch's own length gives.

        autopar.compile(model, mesh, pad_to=autopar.PadTo(128, {"input_ids": 0, "attention_mask": 0, "labels": -100}))

    lengths  a number: its multiples; several: these, and nothing longer
    values   what an input is made longer by, by its name or by that of the argument it is nested in, of several the innermost; None for
             one that stays as it is. Names that a call does not have are passed over: labels, where it evaluates
    dim      the dim of these inputs that counts positions

    That the model gives the same for a batch that is padded is the user's word: with a mask, or causal attention and labels that the loss
    ignores, it does, and batch norm or a mean over positions does not. `parallel.verify(**batch)` compares with the model on the batch
    itself. Raises `InputError` where a length is not positive.
    """

    lengths: int | tuple[int, ...]
    values: Mapping[str, float | None]
    dim: int = 1

    def __post_init__(self) -> None:
        lengths = self.lengths if isinstance(self.lengths, tuple) else (self.lengths,)
        if not lengths or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in lengths):
            raise InputError(
                f"PadTo({self.lengths!r}, ...): pass a length, of which batches are padded to multiples, or a tuple of lengths"
            )
        if not self.values:
            raise InputError('PadTo pads no input: pass values by name, {"input_ids": 0, "labels": -100}')

    def target(self, length: int) -> int:
        """What a batch of this `length` is padded to. Raises `InputError` for one that is too long."""
        if isinstance(self.lengths, int):
            return -(-max(length, 1) // self.lengths) * self.lengths
        fitting = [each for each in self.lengths if each >= length]
        if not fitting:
            raise InputError(
                f"the batch has length {length}, and the longest that pad_to= has is {max(self.lengths)}: cut it, or add a length"
            )
        return min(fitting)
