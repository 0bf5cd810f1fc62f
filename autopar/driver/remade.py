"""Programs that nobody holds: what a pass made is made again, by the same pass from the program before it, when somebody asks.

A program of a model with many layers has thousands of nodes, and dozens of passes follow each other. Held, all of them together are
several times as large as the weights of a small model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from autopar._torch import outside_fake_modes
from autopar.graph.autocast import autocast_off
from autopar.ir.program import Form, Program


@contextmanager
def as_now(is_grad_enabled: bool) -> Generator[None]:
    """As passes run in a compile, whatever torch has been told by the time this is entered."""
    with torch.set_grad_enabled(is_grad_enabled), outside_fake_modes(), autocast_off():
        yield


@dataclass
class Remade:
    """The program, of this `form`, that `remake` makes of the one `before` it, `within` what surrounds passes.

    As long as somebody looks at it, it is one.
    """

    before: Program | Remade
    remake: Callable[[Program], Program]
    within: Callable[[], AbstractContextManager[object]]
    form: Form
    _seen: Callable[[], Program | None] = field(default=lambda: None, repr=False)

    def program(self) -> Program:
        found = self._seen()
        if found is None:
            with self.within():
                found = self.remake(self.before.program() if isinstance(self.before, Remade) else self.before)
            self._seen = weakref.ref(found)
        return found
