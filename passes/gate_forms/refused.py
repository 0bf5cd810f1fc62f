"""Why something that looks like a gate, or a rotary embedding, is not rewritten."""

from __future__ import annotations


class Refused(Exception):
    """A near miss. The text completes "gate at model.py:41 not fused: …"."""
