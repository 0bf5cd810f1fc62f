"""The rules of all ops we know; importing this registers them."""

from autopar.rules import attention, contractions, convolution, creation, indexing, normalisation, pointwise, reductions, views

__all__ = ["attention", "contractions", "convolution", "creation", "indexing", "normalisation", "pointwise", "reductions", "views"]
