"""Reports that are text."""

from __future__ import annotations


class PromptText(str):
    """A string that a prompt or a notebook shows as `print` does, line by line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
