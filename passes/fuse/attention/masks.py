"""What the masks on the scores mean together, and whether the op says the same.

A masked score is −inf or a large negative number. Next to a score that is not masked both give a weight of exactly 0, so a
bool mask says the same. A row in which everything is masked differs: of −inf it makes NaN, which the op makes 0 (no run
that trains has such a row); of numbers it makes equal weights, which the op reproduces where the row is given a query of 0
and all keys. What is *added* is an operand of the op as it is, gradient and all.

Causal and window are flags only where a mask is known before the program runs, and equal to the triangle or the band, entry by entry.
Documents are operands where a part of a mask compares their ids, whatever they are (`conditions.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import tensor_of
from autopar.graph.learned import learned
from autopar.ir.fusion import NotFusible
from autopar.kernels.attention_reference import attended
from autopar.passes.fuse.attention.conditions import (
    Documents,
    Filled,
    choice_at,
    conjunction,
    documents_at,
    is_triangle_within,
    reaches_itself,
)
from autopar.passes.fuse.attention.layout import Labels, Layout, Placed, Scaled
from autopar.passes.fuse.attention.weights import Weights

# A score this low has no weight beside any other, computed in float32 or float64. Above it, it depends on the scores.
LOWEST = -1e9


@dataclass
class Masks:
    """`attends` are to hold all, `added` to be summed. `even_rows`: a row that attends to nothing weighs all keys alike.

    `may_be_empty`: by the flags alone a row attends to nothing.
    """

    is_causal: bool = False
    window: int = 0
    attends: list[Filled] = field(default_factory=list)
    added: list[Scaled] = field(default_factory=list)
    even_rows: bool = False
    conditions: list[str] = field(default_factory=list)
    may_be_empty: bool = False
    documents: Documents | None = None

    def nodes(self) -> list[Node]:
        """What the op reads of them."""
        read = [mask.node for mask in (*self.added, *self.attends)]
        return read + list(self.documents.nodes() if self.documents is not None else ())


def meaning(masks: list[Scaled | Filled], wanted: Layout, labels: Labels, constants: Constants, weights: Weights, lowest: float) -> Masks:
    """The masks, outermost first, in the words of the op. `wanted` is the layout of the op's scores, its last two dims rows and keys.

    Of the weights: `zeroed` are conditions where probabilities become 0 afterwards; where `safe` a row of −inf is 0 in the model, too;
    beside a sink any row that is masked wholly is. A fill of `lowest`, the least number of the scores' dtype, counts as −inf among
    others. Raises `NotFusible`.
    """
    reader = _Reader(wanted, labels, constants, len(masks) == 1, weights.softmax.sink is not None)
    found = Masks()
    fills = [mask for mask in masks if isinstance(mask, Filled)]
    finite = [mask for mask in fills if mask.value != -math.inf]
    _check_fills(masks, finite, lowest)
    _check_zeroed(weights.zeroed, fills)
    decides = bool(finite) and not weights.zeroed and not reader.has_sink
    if decides and len(finite) != len(fills) and reader.may_be_empty(fills):
        raise NotFusible("masks of −inf and of a number meet: what a row gets in which all is masked depends on which")
    finite_rows = decides and reader.may_be_empty(finite)
    if finite_rows and any(isinstance(mask, Scaled) for mask in masks[: masks.index(finite[-1])]):
        raise NotFusible(f"something is added after a mask of {finite[-1].value:g}, which a row that it masks wholly would show")
    reader.read(masks, found, flags=not finite_rows)
    found.even_rows = finite_rows
    unknown = [mask for mask in masks if isinstance(mask, Scaled) and constants.value(mask.node) is None]
    if decides and unknown and not constants.once("learned", lambda: learned(constants)).issuperset(mask.node for mask in unknown):
        # A mask that the batch has, padding as a rule.
        raise NotFusible(
            f"what is added to scores that {finite[-1].value:g} masks may mask the rest of a row, which then shows that number"
        )
    if decides and unknown:
        found.conditions.append("what is learned and added to the scores masks no row wholly")
    if finite_rows:
        found.conditions.append("a row that attends to nothing weighs all keys alike, as there")
    elif (found.attends or found.may_be_empty) and not weights.safe and not weights.zeroed:
        if not reader.has_sink and reader.is_empty(fills):
            raise NotFusible("a row that is known before it runs attends to nothing: it is NaN in the model, and 0 in the op")
        found.conditions.append("a row that attends to nothing is 0, not NaN")
    return found


def meaning_of_one(mask: Node, layout: Layout, wanted: Layout, labels: Labels, constants: Constants) -> Masks:
    """What one mask says where a row that it masks wholly is 0, as in torch's own attention."""
    reader, found = _Reader(wanted, labels, constants, is_only=True, has_sink=False), Masks()
    is_bool = tensor_of(mask).dtype == torch.bool
    reader.read([Filled(mask, layout, True, -math.inf) if is_bool else Scaled(mask, layout, 1.0)], found, flags=True)
    return found


def _check_fills(masks: list[Scaled | Filled], finite: list[Filled], lowest: float) -> None:
    for mask in masks:
        if isinstance(mask, Filled) and not mask.value <= max(LOWEST, lowest):
            raise NotFusible(f"masked scores become {mask.value:g}, which may still get a weight; below {LOWEST:g} they cannot")
    if len({mask.value for mask in finite}) > 1:
        raise NotFusible("two masks put different numbers in place of scores")


def _check_zeroed(zeroed: list[Node], fills: list[Filled]) -> None:
    for condition in zeroed:
        if not any(mask.node is condition and not mask.attends for mask in fills):
            raise NotFusible("probabilities are zeroed where the scores were not masked")


@dataclass
class _Reader:
    wanted: Layout
    labels: Labels
    constants: Constants
    is_only: bool
    has_sink: bool

    def read(self, masks: list[Scaled | Filled], found: Masks, flags: bool) -> None:
        """Flags and documents where `flags` and they say the same; masks where they do not."""
        masks = [part for mask in masks for part in (self._parts(mask, found) if flags else [mask])]
        rest = [mask for mask in masks if not self._is_flag(mask, found, flags)]
        if found.is_causal:  # half of a band is one beside the triangle
            rest = [mask for mask in rest if not self._is_flag(mask, found, flags)]
        for mask in rest:
            (found.added if isinstance(mask, Scaled) else found.attends).append(mask)

    def may_be_empty(self, fills: list[Filled]) -> bool:
        """Whether a row may be masked wholly by `fills`: one of them is not known, or it is.

        Documents of the rows' own positions are known to let each attend to itself, if nothing else does not.
        """
        found, reaches_self = torch.ones((1, 1), dtype=torch.bool), False
        for part in (part for mask in fills for part in self._conjunction(mask)):
            value = self._attended(part)
            if value is not None:
                found = found & value
            elif (documents := self._documents(part)) is not None and reaches_itself(documents, self.wanted, self.labels):
                reaches_self = True
            else:
                return True
        if not reaches_self:
            return not bool(found.any(-1).all())
        rows, keys = (self.labels.size(dim) for dim in self.wanted[-2:])
        return not bool(found.expand(*found.shape[:-2], rows, keys).diagonal(dim1=-2, dim2=-1).all())

    def is_empty(self, fills: list[Filled]) -> bool:
        """Whether a row is masked wholly by those of `fills` that are known."""
        known = [value for mask in fills for part in self._conjunction(mask) if (value := self._attended(part)) is not None]
        return bool(known) and not bool(functools.reduce(torch.logical_and, known).any(-1).all())

    def _parts(self, mask: Scaled | Filled, found: Masks) -> list[Scaled | Filled]:
        """What is left of `mask` beside the documents that `found` then has; `mask` itself where it knows of none."""
        fill = mask if isinstance(mask, Filled) else self._as_filled(mask)
        parts = [] if fill is None or found.documents is not None else self._conjunction(fill)
        for position, part in enumerate(parts):
            if (documents := self._documents(part)) is not None:
                found.documents = documents
                rest: list[Scaled | Filled] = [
                    each for each in parts[:position] + parts[position + 1 :] if not self._is_triangle(each, found)
                ]
                ids = {self.constants.number(node) for node in documents.nodes()}
                if len(ids) == 1 and None not in ids:  # positions that nobody gave restart nowhere
                    found.documents = None
                    return rest
                found.conditions.append("integer ids are compared, of rows and of keys")
                found.may_be_empty = not reaches_itself(documents, self.wanted, self.labels)
                return rest
        return [mask]

    def _conjunction(self, mask: Filled) -> list[Filled]:
        """Masks all of which say together what `mask` says."""
        return conjunction(mask, self.labels, self.constants)

    def _documents(self, mask: Filled) -> Documents | None:
        return documents_at(mask, self.wanted, self.labels, self.constants)

    def _is_triangle(self, mask: Filled, found: Masks) -> bool:
        """Whether `mask` compares positions that say, within the documents, what causal says, which `found` then is."""
        assert found.documents is not None
        if not is_triangle_within(mask, found.documents, self.wanted, self.labels, self.constants):
            return False
        found.conditions.append("positions of a document rise one by one, so their order is that of rows and keys")
        found.is_causal = True
        return True

    def _as_filled(self, mask: Scaled) -> Filled | None:
        """An added choice between 0 and −inf as the fill that it is; numbers that mask as well as it only where no row shows them."""
        fill = choice_at(mask, self.labels, self.constants)
        if fill is None or fill.value > LOWEST:
            return None
        is_sure = fill.value == -math.inf or self.has_sink or (self.is_only and not self.may_be_empty([fill]))
        return fill if is_sure else None

    def _is_flag(self, mask: Scaled | Filled, found: Masks, flags: bool) -> bool:
        """Whether `mask` says nothing, or what a flag says that `found` then has."""
        if self.constants.value(mask.node) is None:
            return False
        views = tuple((op, tuple(argument)) for op, argument in mask.views_along(self.wanted, self.labels))
        sizes = tuple(self.labels.size(dim) for dim in self.wanted)
        how = mask.scale if isinstance(mask, Scaled) else mask.attends
        said = (mask.node, type(mask), how, views, sizes, self.is_only, self.has_sink, found.is_causal, flags)
        # All layers read one mask, and to look at every entry of it takes long.
        position = self.constants.once(("flag", *said), lambda: self._says(mask, found.is_causal, flags))
        if isinstance(position, tuple):
            self._set(found, *position)
        return position is not None

    def _says(self, mask: Scaled | Filled, is_causal: bool, flags: bool) -> tuple[bool, int] | Literal["nothing"] | None:
        """The (causal, window) that says what `mask` says; None where no flag does."""
        attends = self._added_attended(mask) if isinstance(mask, Scaled) else self._attended(mask)
        if attends is None or bool(attends.all()):
            return None if attends is None else "nothing"
        return self._positions(attends, is_causal) if flags else None

    def _value(self, mask: Placed) -> torch.Tensor | None:
        """A known mask that broadcasts to the op's scores."""
        value = self.constants.value(mask.node)
        return None if value is None else mask.known_along(value, self.wanted, self.labels)

    def _attended(self, mask: Filled) -> torch.Tensor | None:
        value = self._value(mask)
        return value if value is None or mask.attends else ~value

    def _added_attended(self, mask: Scaled) -> torch.Tensor | None:
        """Where a known mask adds nothing; None where it adds anything but −inf, or numbers that mask as well as it."""
        value = self._value(mask)
        if value is None:
            return None
        value = value * mask.scale
        if not bool(value.any()):
            return torch.ones_like(value, dtype=torch.bool)
        infinite = value == -torch.inf
        masked = infinite if bool(infinite.any()) else value <= LOWEST
        if not bool((masked | (value == 0)).all()):
            return None
        # A number shows in a row that it masks wholly, or that it and another mask do.
        is_alone = self.is_only and bool((~masked).any(-1).all())
        return ~masked if bool(infinite.any()) or is_alone or self.has_sink else None

    def _positions(self, attends: torch.Tensor, is_causal: bool) -> tuple[bool, int] | None:
        """(causal, window) that say what `attends` says, among the positions of the triangle alone where `is_causal` already."""
        rows, keys = (self.labels.size(dim) for dim in self.wanted[-2:])
        if tuple(attends.shape[-2:]) != (rows, keys):
            return None
        pattern = attends.reshape(-1, rows, keys)[0]
        if not bool((attends == pattern).all()):
            return None
        if is_causal:
            pattern = pattern.tril()
        s = torch.arange(rows)[pattern.any(-1)]
        if not len(s):
            return None
        attending = pattern[s].to(torch.uint8)
        first, last = attending.argmax(-1), keys - 1 - attending.flip(-1).argmax(-1)
        causal = bool((last <= s).all())
        for window in (0, int(torch.maximum(s - first, last - s).max()) + 1):
            if bool((pattern == attended(rows, keys, causal, window, pattern.device)).all()):
                return causal, window
        return None

    def _set(self, found: Masks, is_causal: bool, window: int) -> None:
        rows, keys = (self.labels.size(dim) for dim in self.wanted[-2:])
        shape = "the triangle" if is_causal and not window else f"a band of {window} keys" + (" in the triangle" if is_causal else "")
        found.conditions.append(f"the mask is {shape}, entry by entry")
        found.is_causal = found.is_causal or is_causal
        found.window = min(filter(None, (found.window, window)), default=0)
        flags = rows, keys, found.is_causal, found.window
        found.may_be_empty |= self.constants.once(
            ("may be empty", *flags), lambda: not bool(attended(*flags, torch.device("cpu")).any(-1).all())
        )
