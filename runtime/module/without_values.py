"""Tensors without values that stand for those of a model, and what is noted at its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime._torch import storage_key

# Of a placed parameter whether its part may not leave its memory.
KEEPS_MEMORY = "_keeps_memory"
# Of a placed parameter the strides that it had: its part lies side by side, and forward may ask how the model's lies.
STRIDES = "_strides_of_model"
# Of one tensor alone: ours, and torch's mark of a parameter that is of another class of tensors.
_OWN = (KEEPS_MEMORY, STRIDES, "_is_param")


def stands_in(tensors: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """What stands for each of `tensors` on `device`, by its id: it has its strides and what is noted at it, and lies in one memory with
    what stands for others in its memory, so that a write into that is seen."""
    distinct = {id(tensor): tensor for tensor in tensors}
    num_in = Counter(storage_key(tensor) for tensor in distinct.values() if _is_plain(tensor))
    memories: dict[int, torch.Tensor] = {}
    found: dict[int, torch.Tensor] = {}
    for key, tensor in distinct.items():
        if tensor.layout is not torch.strided:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=device)
        elif isinstance(tensor, DTensor) or num_in[storage_key(tensor)] == 1:
            empty = torch.empty_strided(tensor.shape, getattr(tensor, STRIDES, tensor.stride()), dtype=tensor.dtype, device=device)
        else:
            size_bytes = tensor.untyped_storage().nbytes()
            memory = memories.setdefault(storage_key(tensor), torch.empty(size_bytes, dtype=torch.uint8, device=device))
            numbers = memory[: size_bytes - size_bytes % tensor.element_size()].view(tensor.dtype)
            empty = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            hand_on_attributes(tensor, empty)
        found[key] = empty
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) and tensor.layout is torch.strided


def hand_on_attributes(old: nn.Parameter, new: torch.Tensor) -> None:
    """What somebody has noted at a parameter (`p.no_decay = True`), which forward, or who makes an optimizer, may read."""
    for name, value in vars(old).items():
        if name not in _OWN:
            setattr(new, name, value)
