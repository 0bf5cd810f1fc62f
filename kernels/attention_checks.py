"""What the attention op asks of its operands, said where it is traced: shapes, ids of documents, dropout's draws, options."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels.attention_masks import Masks

KERNELS = ("triton", "aten")


def require_fit(query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> None:
    """Raises ValueError, saying what is asked and what is given, where one of the below does not hold."""
    require_shapes(query, key, value, masks.mask)
    require_documents(query, key, masks)
    require_draws((*query.shape[:3], key.shape[2]), masks)
    require_options(masks)


def require_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    batch, num_heads, length, head_size = query.shape
    fits = key.shape[0] == batch and key.shape[3] == head_size and value.shape[:3] == key.shape[:3] and num_heads % key.shape[1] == 0
    if not fits:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"attention takes [B, H, S, D], [B, G, T, D], [B, G, T, E] with H a multiple of G; got {shapes}")
    scores = (batch, num_heads, length, key.shape[2])
    if mask is not None and not _broadcasts(mask.shape, scores):
        raise ValueError(f"an attention mask {tuple(mask.shape)} does not broadcast to {scores}")


def require_documents(query: Tensor, key: Tensor, masks: Masks) -> None:
    query_documents, key_documents = masks.query_documents, masks.key_documents
    if query_documents is None or key_documents is None:
        if query_documents is not key_documents:
            given = "query_documents" if key_documents is None else "key_documents"
            raise ValueError(f"attention's {given} are given alone: who attends to whom takes the ids of queries and of keys")
        return
    for name, documents, length in (("query_documents", query_documents, query.shape[2]), ("key_documents", key_documents, key.shape[2])):
        if tuple(documents.shape) not in ((query.shape[0], length), (1, length)):
            raise ValueError(f"attention's {name} are {tuple(documents.shape)}, not {(query.shape[0], length)} or {(1, length)}")
        if documents.dtype == torch.bool or documents.is_floating_point() or documents.is_complex():
            raise ValueError(f"attention's {name} are of {documents.dtype}: ids are integers")


def require_draws(scores: Sequence[int], masks: Masks) -> None:
    """What dropout of `scores` (their shape) is drawn from: all three or none, and then nothing is drawn or not yet."""
    given = {"drop_rows": masks.drop_rows, "drop_second": masks.drop_second, "drop_columns": masks.drop_columns}
    missing = [name for name, each in given.items() if each is None]
    if len(missing) in (1, 2):
        raise ValueError(f"attention lacks {' and '.join(missing)}: dropout is drawn from drop_rows, drop_second and drop_columns together")
    if not 0 <= masks.keep_below <= 2**32 or (not missing and not masks.drops):
        asked = "from 1 to 2**32 with dropout, or 0 without it and what it is drawn from"
        raise ValueError(f"attention's keep_below is {masks.keep_below}: draws are in [0, 2**32), and it is {asked}")
    for name, each in given.items():
        if each is None:
            continue
        if each.dtype != torch.int64:
            raise ValueError(f"attention's {name} are of {each.dtype}: positions are torch.int64")
        if name == "drop_columns" and tuple(each.shape) != (scores[3],):
            raise ValueError(f"attention's drop_columns are {tuple(each.shape)}, not {(scores[3],)}")
        if name != "drop_columns" and not _broadcasts(each.shape, (*scores[:3], 1)):
            raise ValueError(f"attention's {name} are {tuple(each.shape)}, which do not broadcast to {(*scores[:3], 1)}")


def require_drawn(masks: Masks) -> None:
    """Raises ValueError where a dropout that is traced, and not drawn yet, would run."""
    if masks.drops and masks.draws() is None:
        raise ValueError(f"attention with dropout (keep_below {masks.keep_below}) needs drop_rows, drop_second and drop_columns to run")


def require_options(masks: Masks) -> None:
    if masks.window < 0:
        raise ValueError(f"attention's window is {masks.window}: it counts keys, and 0 is none")
    if masks.soft_cap < 0.0:
        raise ValueError(f"attention's soft cap is {masks.soft_cap:g}: it bounds the scores' size, and 0 is none")
    if masks.implementation not in KERNELS:
        raise ValueError(f"attention's implementation is {masks.implementation!r}: it is one of {', '.join(map(repr, KERNELS))}")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(to), strict=False))
