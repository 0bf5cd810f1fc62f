"""The rules of all ops we know; importing this registers them."""

from autopar.ops.rules import (
    attention,
    block_sparse,
    contractions,
    convolution,
    creation,
    distances,
    experts,
    fused,
    indexing,
    normalisation,
    pointwise,
    reductions,
    resampling,
    transforms,
    views,
)

__all__ = [
    "attention",
    "block_sparse",
    "contractions",
    "convolution",
    "creation",
    "distances",
    "experts",
    "fused",
    "indexing",
    "normalisation",
    "pointwise",
    "reductions",
    "resampling",
    "transforms",
    "views",
]
