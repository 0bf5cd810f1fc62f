"""What a command says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Of the JSON: keys and their meaning stay until it is raised.
VERSION = 1
# What shells have for a program that Ctrl-C stopped.
INTERRUPTED = 130


@dataclass(frozen=True)
class Answer:
    """Text for people, values for programs, and the exit code."""

    text: str
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    code: int = 0

    @property
    def json(self) -> dict[str, Any]:
        return {"version": VERSION, **self.values}
