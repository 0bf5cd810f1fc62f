"""Why something that looks like a norm is not rewritten."""

from __future__ import annotations


class Refused(Exception):
    """A near miss. The text completes "norm at model.py:41 not fused: …"."""
