"""Where fragments end whatever they wait for: between repeated blocks of the model, so that eighty equal layers give one fragment, and
between pieces of a value of which each is sent by itself."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.fx import Node

from autopar.ir.keys import CHUNK, SOURCE

_BLOCK = re.compile(r"^(.*?\.\d+)(\.|$)")


class Place(NamedTuple):
    """Where a walk over calls is: the block of the last call that has one, `transformer.h.3`, and the number of the piece, if any."""

    block: str = ""
    chunk: int | None = None

    def at(self, node: Node) -> Place:
        source = SOURCE.get(node)
        match = _BLOCK.match(source.module) if source else None
        return Place(match.group(1) if match else self.block, CHUNK.get(node))

    def is_cut_from(self, before: Place) -> bool:
        """Whether a fragment ends between the two. What belongs to no block goes with any; a piece is sent before the next is computed."""
        return self.chunk != before.chunk or (before.block != "" and self.block != before.block)
