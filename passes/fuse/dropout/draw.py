"""A mask that `autopar/graph/draws.py` draws, taken apart: the positions, the words and the bound that it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.emit import tensor_of
from autopar.ir.fusion import NotFusible
from autopar.kernels.dropout import FACTORS

aten = torch.ops.aten

_MASK_32 = (1 << 32) - 1


@dataclass(frozen=True)
class Draw:
    """The mask `drawn(rows, second, columns) < keep_below` of `autopar/kernels/dropout.py`."""

    rows: Node
    second: Node
    columns: Node
    keep_below: int

    @property
    def probability(self) -> float:
        """That of being dropped."""
        return 1.0 - self.keep_below / 2**32


def read_mask(mask: Node, shape: torch.Size) -> Draw | None:
    """What `mask` was drawn from; None where it was not drawn. Raises `NotFusible` where the ops cannot draw it for x of `shape`."""
    draws, keep_below = _operands(mask, aten.lt.Scalar)
    product, _ = _operands(draws, aten.bitwise_and.Scalar, _MASK_32)
    value, _ = _operands(product, aten.mul.Tensor, FACTORS[2])
    stirred, second = _operands(_unstirred(value, FACTORS[1]), aten.bitwise_xor.Tensor)
    position = _unstirred(stirred, FACTORS[0])
    if position is None:
        return None
    if tensor_of(mask).shape != shape:
        raise NotFusible(f"it drops whole channels: its mask is {list(tensor_of(mask).shape)}")
    if not shape or shape[-1] == 1:
        raise NotFusible(f"its last dim has one element: {list(shape)}")
    # The last sum is along the last dim.
    rows, last = _operands(position, aten.add.Tensor)
    columns, _ = _operands(last, aten.view.default)
    if keep_below <= 0:
        raise NotFusible("it drops everything, p = 1")
    assert isinstance(rows, Node) and isinstance(second, Node) and isinstance(columns, Node) and columns.args == (shape[-1],), position
    return Draw(rows, second, columns, keep_below)


def _unstirred(value: Any, factor: int) -> Any:
    """x of stir(x, factor) = (y ^ y >> 32) mod 2³² where y = x · factor; None where `value` is none."""
    folded, _ = _operands(value, aten.bitwise_and.Scalar, _MASK_32)
    product, shifted = _operands(folded, aten.bitwise_xor.Tensor)
    same, _ = _operands(shifted, aten.bitwise_right_shift.Tensor_Scalar, 32)
    found, _ = _operands(product, aten.mul.Tensor, factor)
    return found if same is product else None


def _operands(node: Any, target: object, number: int | None = None) -> tuple[Any, Any]:
    """The first two arguments of a call of `target`, the second being `number` where one is given; (None, None) for any other value."""
    if not isinstance(node, Node) or node.target is not target or (number is not None and node.args[1] != number):
        return None, None
    first, *rest = node.args
    return first, rest[0] if rest else None
