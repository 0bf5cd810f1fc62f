"""Whether a model with all its layers does what it does with few of them, layer by layer: their recorded lines are compared.

The lines of a record name memory by numbers that are counted from its beginning. Here a layer's memory is counted from the layer, and a
line says of what it reads whether that is of the same layer, of so many layers before, or of what stands around all layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cache.trace import Trace
from autopar.graph.layers import SHOWN, LayerRun

_MEMORY = re.compile(r"%(\d+)(?=\+)")
# How far autograd has counted, in front of the lines on the stack: it follows from the ops.
_COUNT = re.compile(r" \d+ ((@\d+ ?)*)$")
# The graph of the backward, which follows from the ops as well.
_BACKWARD = re.compile(r"from -?\d+ \d+|\w+ -?\d+ \[.*\]")


def does_the_same(full: Trace, few: Trace, run: LayerRun) -> bool:
    """Whether the run that `full` records, of all layers, is that of `few` with its third layer repeated."""
    if full.spec.structure != few.spec.structure or full.spec.leaves != few.spec.leaves or full.spec.assigned != few.spec.assigned:
        return False
    whole, part = _Reader(run, run.number - 1).read(full.lines), _Reader(run, SHOWN - 1).read(few.lines)
    same = whole.order == list(range(run.number)) and part.order == list(range(SHOWN))
    same = same and sorted(whole.layers) == whole.order and sorted(part.layers) == part.order and whole.around == part.around
    same = same and all(whole.layers[layer] == part.layers[layer] for layer in range(SHOWN))
    return same and all(whole.layers[layer] == part.layers[2] for layer in range(2, run.number))


@dataclass
class _Lines:
    """`layers` has the lines of each, `around` all others, and whether they stand before, between or behind layers.

    `order` is that in which layers run, one behind another. What is written in place does not tell of it: memory is named, not its state.
    """

    around: list[tuple[int, str]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    layers: dict[int, list[str]] = field(default_factory=dict)


class _Reader:
    """Reads a record of a model whose last layer of the run is `last`."""

    def __init__(self, run: LayerRun, last: int) -> None:
        self.run, self.last, self.found = run, last, _Lines()
        self.homes: dict[str, tuple[int | None, int]] = {}  # of memory: the layer that made it, and its number there
        self.counts: dict[int | None, int] = {}

    def read(self, lines: Sequence[str]) -> _Lines:
        inside: int | None = None
        for line in lines:
            if _BACKWARD.fullmatch(line):
                continue
            word, _, rest = line.partition(" ")
            path = rest.partition(" ")[0] if word in ("enter", "leave") else word if rest.startswith("is %") else ""
            layer = self.run.layer_of(path)
            text = line if layer is None else line.replace(path, self.run.renamed(path, "*"), 1)
            own = inside if inside is not None or word == "leave" else layer
            self._add(text, own)
            if layer is not None and word == "enter" and path == f"{self.run.path}.{layer}" and self.found.order[-1:] != [layer]:
                self.found.order.append(layer)
            if layer is not None and path == f"{self.run.path}.{layer}":
                inside = layer if word == "enter" else None
        return self.found

    def _add(self, line: str, layer: int | None) -> None:
        text = _COUNT.sub(r" \1", _MEMORY.sub(lambda memory: self._home(memory[1], layer), line))
        if layer is None:
            order = self.found.order
            self.found.around.append((0 if not order else 2 if order[-1] == self.last else 1, text))
        else:
            self.found.layers.setdefault(layer, []).append(text)

    def _home(self, number: str, reader: int | None) -> str:
        if number not in self.homes:
            self.counts[reader] = self.counts.get(reader, -1) + 1
            self.homes[number] = (reader, self.counts[reader])
        layer, count = self.homes[number]
        if layer is None:
            return f"around.{count}"
        if reader is None:
            return f"last.{count}" if layer == self.last else f"layer {layer}.{count}"
        return f"first.{count}" if layer == 0 and reader > 1 else f"{layer - reader}.{count}"
