"""Writes into an index or a view of what lies on processes, where that is a copy: `emb.weight.data[0].zero_()` of rows that are split.

On one device an index of a tensor shows its memory. Torch gathers what an index of a split dim needs into memory of its own, and what is
written there is lost without a word. Where the memory is the parameter's own, as of a dim that is whole on each rank, nothing changes.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar._torch import written_operands
from autopar.errors import AutoparError
from autopar.runtime._torch import has_values, local_part, storage_key

VIEWS = frozenset(
    "alias as_strided diagonal expand permute select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view".split()
)
# What is a copy where one device has a view, and in words of what.
_COPIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(operand: Any, result: Any) -> None:
    """Note which of the results of a view op on `operand` are copies."""
    if not isinstance(operand, DTensor) or not has_values(local_part(operand)):
        return
    said = (
        _COPIES.get(operand)
        or f"{list(operand.shape)} that lies as {tuple(operand.placements)} on {tuple(operand.device_mesh.shape)} ranks"
    )
    for each in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(each, DTensor) and (operand in _COPIES or storage_key(local_part(each)) != storage_key(local_part(operand))):
            _COPIES[each] = said


def refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `AutoparError` where `op` writes into such a copy."""
    lost = next((each for each in written_operands(op, args, kwargs) if each in _COPIES), None)
    if lost is not None:
        raise AutoparError(
            f"{op} writes into an index or a view of {_COPIES[lost]}: torch has gathered that into memory of its own, and what is written "
            "there would be lost. Write into the whole: p.copy_(torch.where(mask, x, p)) with mask and x made to lie as p does, by "
            "distribute_tensor(mask, p.device_mesh, p.placements) of torch.distributed.tensor, on every rank; or change "
            "parallel.full_state_dict() and load that by parallel.load_state_dict"
        )
