"""Why something that looks like attention is not rewritten."""

from __future__ import annotations


class Refused(Exception):
    """A near miss. The text completes "attention at model.py:41 not fused: …"."""


class NotScores(Refused):
    """No product of queries and keys lies above: this is no attention, and nothing is said of it."""
