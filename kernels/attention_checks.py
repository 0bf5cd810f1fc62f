"""What the attention op asks of its operands, said where it is traced: shapes, ids of documents, options."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels.attention_reference import Options


def require_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None) -> None:
    batch, num_heads, length, head_size = query.shape
    fits = key.shape[0] == batch and key.shape[3] == head_size and value.shape[:3] == key.shape[:3] and num_heads % key.shape[1] == 0
    if not fits:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"attention takes [B, H, S, D], [B, G, T, D], [B, G, T, E] with H a multiple of G; got {shapes}")
    scores = (batch, num_heads, length, key.shape[2])
    if mask is not None and not _broadcasts(mask.shape, scores):
        raise ValueError(f"an attention mask {tuple(mask.shape)} does not broadcast to {scores}")
    if keep is not None and tuple(keep.shape) != scores:
        raise ValueError(f"attention's keep is {tuple(keep.shape)}, not {scores}")


def require_documents(query: Tensor, key: Tensor, query_documents: Tensor | None, key_documents: Tensor | None) -> None:
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


def require_options(options: Options) -> None:
    if options["window"] < 0:
        raise ValueError(f"attention's window is {options['window']}: it counts keys, and 0 is none")
    if options["soft_cap"] < 0.0:
        raise ValueError(f"attention's soft cap is {options['soft_cap']:g}: it bounds the scores' size, and 0 is none")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(to), strict=False))
