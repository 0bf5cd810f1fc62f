"""What the masks on the scores mean together, and whether the op says the same.

A masked score is −inf or a large negative number. Next to a score that is not masked both give a weight of exactly 0, so a
bool mask says the same. A row in which everything is masked differs: of −inf it makes NaN, which the op makes 0 (no run
that trains has such a row); of numbers it makes equal weights, which the op reproduces where the row is given a query of 0
and all keys. What is *added* is an operand of the op as it is, gradient and all.

Causal is a flag only where the mask is known before the program runs, and equal to the triangle, entry by entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from autopar.constants import Constants
from autopar.passes.attention_forms.arrange import arranged_value, broadcast_layout
from autopar.passes.attention_forms.layout import Labels, Layout
from autopar.passes.attention_forms.refused import Refused
from autopar.passes.attention_forms.scores import Added, Filled

# A score this low has no weight beside any other, computed in float32 or float64. Above it, it depends on the scores.
LOWEST = -1e9


@dataclass
class Masks:
    """`attends` are to hold all, `added` to be summed. `even_rows`: a row that attends to nothing weighs all keys alike."""

    is_causal: bool = False
    attends: list[Filled] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    even_rows: bool = False
    conditions: list[str] = field(default_factory=list)


def meaning(
    masks: list[Added | Filled], wanted: Layout, labels: Labels, constants: Constants, zeroed: list[Node], safe: bool, lowest: float
) -> Masks:
    """The masks, outermost first, in the words of the op. `wanted` is the layout of the op's scores, its last two dims rows and keys.

    `zeroed` are conditions where probabilities become 0 afterwards, with `safe` a row of −inf is 0 in the model, too; a fill of
    `lowest`, the least number of the scores' dtype, counts as −inf among others. Raises `Refused`.
    """
    reader = _Reader(wanted, labels, constants, len(masks) == 1)
    found = Masks()
    fills = [mask for mask in masks if isinstance(mask, Filled)]
    finite = [mask for mask in fills if mask.value != -math.inf]
    _check_fills(masks, finite, lowest)
    _check_zeroed(zeroed, fills)
    known = reader.attended(finite) if finite else None
    finite_rows = bool(finite) and (known is None or bool((~known.any(-1)).any())) and not zeroed
    if finite_rows and len(finite) != len(fills):
        raise Refused("masks of −inf and of a number meet: what a row gets in which all is masked depends on which")
    if finite_rows and any(isinstance(mask, Added) for mask in masks[: masks.index(finite[-1])]):
        raise Refused(f"something is added after a mask of {finite[-1].value:g}, which a row that it masks wholly would show")
    for mask in masks:
        if isinstance(mask, Added):
            reader.read_added(mask, found)
        else:
            reader.read_filled(mask, found, flag=not finite_rows)
    found.even_rows = finite_rows
    if finite_rows:
        found.conditions.append("a row that attends to nothing weighs all keys alike, as there")
    elif found.attends and not safe and not zeroed:
        found.conditions.append("a row that attends to nothing is 0, not NaN")
    return found


def _check_fills(masks: list[Added | Filled], finite: list[Filled], lowest: float) -> None:
    for mask in masks:
        if isinstance(mask, Filled) and not mask.value <= max(LOWEST, lowest):
            raise Refused(f"masked scores become {mask.value:g}, which may still get a weight; below {LOWEST:g} they cannot")
    if len({mask.value for mask in finite}) > 1:
        raise Refused("two masks put different numbers in place of scores")


def _check_zeroed(zeroed: list[Node], fills: list[Filled]) -> None:
    for condition in zeroed:
        if not any(mask.condition is condition and not mask.attends for mask in fills):
            raise Refused("probabilities are zeroed where the scores were not masked")


@dataclass
class _Reader:
    wanted: Layout
    labels: Labels
    constants: Constants
    is_only: bool

    def _value(self, node: Node, layout: Layout) -> torch.Tensor | None:
        """A known mask that broadcasts to the op's scores."""
        value = self.constants.value(node)
        if value is None:
            return None
        return arranged_value(value, layout, broadcast_layout(layout, self.wanted, self.labels), self.labels)

    def attended(self, fills: list[Filled]) -> torch.Tensor | None:
        """Where all of `fills` let attend; None where one is not known."""
        found: torch.Tensor | None = None
        for mask in fills:
            value = self._value(mask.condition, mask.layout)
            if value is None:
                return None
            value = value if mask.attends else ~value
            found = value if found is None else found & value
        return found

    def _is_causal(self, attends: torch.Tensor) -> bool:
        size = tuple(self.labels.size(dim) for dim in self.wanted[-2:])
        triangle = torch.ones(size, dtype=torch.bool).tril_()
        return tuple(attends.shape[-2:]) == size and bool((attends == triangle).all())

    def read_filled(self, mask: Filled, found: Masks, flag: bool) -> None:
        value = self._value(mask.condition, mask.layout)
        if value is not None:
            attends = value if mask.attends else ~value
            if bool(attends.all()):
                return
            if flag and self._is_causal(attends):
                self._set_causal(found)
                return
        found.attends.append(mask)

    def read_added(self, mask: Added, found: Masks) -> None:
        value = self._value(mask.value, mask.layout)
        if value is not None:
            value = value * mask.factor
            if not bool(value.any()):
                return
            infinite = value == -torch.inf
            masked = infinite if bool(infinite.any()) else value <= LOWEST
            # Beside another mask, a number would show in a row that the two mask wholly.
            fits = bool((masked | (value == 0)).all()) and (self.is_only or bool(infinite.any()))
            if fits and self._is_causal(~masked):
                self._set_causal(found)
                return
        found.added.append(mask)

    def _set_causal(self, found: Masks) -> None:
        found.is_causal = True
        found.conditions.append("the mask is the triangle, entry by entry")
