"""How the attention kernels are told of `Masks` (`autopar/kernels/attention_masks.py`): tensors, strides, constants, what crowds a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.attention_masks import Masks
from autopar.kernels.gpu import attention_documents
from autopar.kernels.gpu.attention_scores import block_of, require_addressable
from autopar.kernels.gpu.attention_tiles import DOCUMENTS, DOCUMENTS_MASK, DROPS, DROPS_MASK, MASK, NOTHING

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2
NO_DROPS, WORD_OF_HEAD, WORDS_OF_ROWS = 0, 1, 2


def operands(masks: Masks, query: Tensor, key: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(mask, query_documents, key_documents, rows, second, columns), and strides: four of the mask, how far the next sample's ids lie,
    three each of rows and of second. `query` and 0 stand for what there is not.

    Raises ValueError where a sample of one of them reaches beyond what the kernels' 32-bit offsets address.
    """
    shape = query.shape[:3]
    tensors, strides = [query] * 6, [0] * 12
    if masks.mask is not None:
        tensors[0] = masks.mask.expand(*shape, key.shape[2])
        strides[:4] = tensors[0].stride()
    if masks.query_documents is not None and masks.key_documents is not None:
        tensors[1:3] = masks.query_documents.contiguous(), masks.key_documents.contiguous()
        strides[4:6] = (_sample_stride(each) for each in tensors[1:3])
    draws = masks.draws()
    if draws is not None:
        tensors[3:] = *(each.expand(*shape, 1) for each in draws[:2]), draws[2].contiguous()
        strides[6:] = *tensors[3].stride()[:3], *tensors[4].stride()[:3]
    require_addressable(tensors[0], tensors[3], tensors[4])
    return tuple(tensors), tuple(strides)


def constants(masks: Masks, query: Tensor) -> dict[str, bool | int]:
    """What a kernel is compiled for."""
    draws = masks.draws()
    has_word = draws is not None and draws[1].expand(*query.shape[:3], 1).stride(2) == 0
    return {
        "MASK": NO_MASK if masks.mask is None else BOOL_MASK if masks.mask.dtype == torch.bool else ADDED_MASK,
        "DROPS": NO_DROPS if draws is None else WORD_OF_HEAD if has_word else WORDS_OF_ROWS,
        "LARGEST_KEPT": max(masks.keep_below - 1, 0),
        "CAUSAL": masks.is_causal,
        "WINDOW": masks.window > 0,
        "SOFT_CAP": masks.soft_cap > 0.0,
        "DOCUMENTS": masks.has_documents,
    }


def crowding(masks: Masks, *sizes: int) -> int:
    """What else takes registers of a tile, as `attention_tiles.py` names it; heads whose `sizes` do not fill it crowd it as a mask does."""
    has_mask = masks.mask is not None
    if masks.has_documents:
        return DOCUMENTS_MASK if has_mask or masks.drops or masks.soft_cap > 0.0 else DOCUMENTS
    if masks.drops:
        return DROPS_MASK if has_mask else DROPS
    is_partial = any(size != block_of(size) for size in sizes)
    return MASK if has_mask or masks.window > 0 or masks.soft_cap > 0.0 or is_partial else NOTHING


def bounds(masks: Masks, queries: int, keys: int, query: Tensor, of_keys: bool = False) -> tuple[Tensor, int]:
    """Where each tile of queries starts and ends its walk over the keys (`of_keys`: of keys, over the queries), and how far the next
    sample's lie; `query` and 0 where there are no documents."""
    if masks.query_documents is None or masks.key_documents is None:
        return query, 0
    own, others = (masks.query_documents, queries), (masks.key_documents, keys)
    own, others = (others, own) if of_keys else (own, others)
    found = attention_documents.bounds(*own, *others)
    return found, _sample_stride(found)


def _sample_stride(value: Tensor) -> int:
    """What lies between two samples of a contiguous tensor, 0 where one is for all of them."""
    return value.stride(0) if value.shape[0] > 1 else 0
