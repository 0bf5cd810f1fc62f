"""The rules of all ops we know; importing this registers them."""

from autopar.ops.rules import (
    contractions,
    convolution,
    creation,
    distances,
    experts,
    indexing,
    linear_algebra,
    normalisation,
    pointwise,
    reductions,
    resampling,
    transforms,
    views,
)

__all__ = [
    "contractions",
    "convolution",
    "creation",
    "distances",
    "experts",
    "indexing",
    "linear_algebra",
    "normalisation",
    "pointwise",
    "reductions",
    "resampling",
    "transforms",
    "views",
]
