"""Random small models: a few calls over a few sizes, as source code, which prints and shrinks well.

Every call is run as it is drawn, on the very values that a test will use. So shapes are known, and a call whose result depends on
how the sums before it round (the order of equal numbers, the sign of zero) is not drawn.
"""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

SIZES = (2, 3, 4, 6, 8)
BATCHES = (4, 8)
MAX_NUMEL = 1024
# Values that lie closer together than this may change places when sums are put together otherwise.
GAP = 1e-5
_NUMBER = count()


class Unfit(Exception):
    """A call that cannot be drawn here."""


def need(condition: bool) -> None:
    if not condition:
        raise Unfit


@dataclass(frozen=True)
class RandomGraph:
    """A model in float64 with its batch.

    `shapes` are those of the parameters; `tied` gives a parameter's second name; `inputs` says of every input its shape and, of
    whole numbers, their limit (floats: 0, booleans: 1). Dim 0 of an input counts samples.
    """

    lines: tuple[str, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    tied: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def source(self) -> str:
        names = ", ".join(name for name, _, _ in self.inputs)
        return "\n    ".join((f"def forward(self, {names}):", *self.lines)) + "\n"

    @property
    def drops(self) -> bool:
        return "dropout" in self.source

    def __repr__(self) -> str:
        tied = "".join(f"\n# self.{new} = self.{old}" for new, old in self.tied)
        shapes = "".join(f"\n# self.{name}: {shape}" for name, shape in self.shapes)
        inputs = "".join(f"\n# {name}: {shape}, limit {limit}" for name, shape, limit in self.inputs)
        return f"RandomGraph{inputs}{shapes}{tied}\n{self.source}"

    def batch(self) -> dict[str, Tensor]:
        return {name: _values(name, shape, limit) for name, shape, limit in self.inputs}

    def model(self) -> nn.Module:
        name = f"random graph {next(_NUMBER)}"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"torch": torch, "functional": functional}
        exec(compile(self.source, name, "exec"), namespace)
        model = type("Random", (nn.Module,), {"forward": namespace["forward"]})()
        for name, shape in self.shapes:
            model.register_parameter(name, nn.Parameter(_values(name, shape, 0)))
        for new, old in self.tied:
            model.register_parameter(new, model.get_parameter(old))
        return model


def _values(name: str, shape: tuple[int, ...], limit: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    if limit == 0:
        return torch.randn(shape, generator=draw, dtype=torch.float64)
    numbers = torch.randint(0, max(limit, 2), shape, generator=draw)
    return numbers.bool() if limit == 1 else numbers


@dataclass
class Builder:
    """A graph as far as it is drawn: the source, and the value of each of its names.

    `kept` are floats that descend from a parameter or an input and may be used; `drawn` those that descend from a dropout.
    """

    draw: Callable[[st.SearchStrategy[Any]], Any]
    turns: random.Random
    batch: int
    lines: list[str] = field(default_factory=list[str])
    names: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    inputs: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict[str, tuple[tuple[int, ...], int]])
    kept: list[str] = field(default_factory=list[str])
    drawn: set[str] = field(default_factory=set[str])

    # What the catalogue of calls draws with.

    def number(self, least: int, most: int) -> int:
        """Hypothesis is fond of the least of all numbers, and would draw the same graphs again and again: each graph has its own."""
        count = most - least + 1
        need(count > 0)
        return least + (self.draw(st.integers(0, count - 1)) + self.turns.randrange(count)) % count

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def chance(self) -> bool:
        return self.number(0, 1) == 0

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.names[name].shape)

    def tensor(self, fits: Callable[[tuple[int, ...]], bool] = lambda _: True, ordered: bool = False) -> str:
        """A float that is there already, the latest first. With `ordered` none that a dropout drew: its values are not known here."""
        choices = [name for name in reversed(self.kept) if fits(self.shape(name)) and not (ordered and name in self.drawn)]
        return self.one_of(choices[:1] if self.chance() else choices)

    def dim(self, name: str, fits: Callable[[int], bool] = lambda size: size > 1) -> int:
        return self.one_of([i for i, size in enumerate(self.shape(name)) if fits(size)])

    def parameter(self, *shape: int) -> str:
        """A new parameter, an old one of the same shape (perhaps by another name), or an old one transposed."""
        need(math.prod(shape) <= MAX_NUMEL)
        same = [f"self.{name}" for name, other in self.shapes.items() if other == shape]
        turned = [f"self.{name}.t()" for name, other in self.shapes.items() if len(shape) == 2 and other == shape[::-1] != shape]
        if (same or turned) and self.number(0, 2) == 0:
            found = self.one_of([*same, *turned])
            if found in same and self.chance():
                new = f"q{len(self.tied)}"
                self.tied[new] = found.removeprefix("self.")
                self.names[f"self.{new}"] = self.names[found]
                return f"self.{new}"
            return found
        name = f"p{len(self.shapes)}"
        self.shapes[name] = shape
        self.names[f"self.{name}"] = _values(name, shape, 0)
        return f"self.{name}"

    def whole_numbers(self, shape: tuple[int, ...], limit: int) -> str:
        """Whole numbers below `limit`: an input where they can be a batch, else (or by chance) computed from positions."""
        if shape and shape[0] == self.batch and self.chance():
            return self.input(shape, max(limit, 2)) + (f" % {limit}" if limit < 2 else "")
        step, start = self.one_of((1, 3, 5, 7)), self.number(0, limit - 1)
        return f"((torch.arange({math.prod(shape)}) * {step} + {start}) % {limit}).view({list(shape)})"

    def mask(self, shape: tuple[int, ...]) -> str:
        """A boolean of `shape` or broadcast to it: an input, a comparison of floats, of positions."""
        kind = self.number(0, 2)
        same = [name for name in self.kept if self.shape(name) == shape and self.is_apart(f"{name} - 0.25") and name not in self.drawn]
        if kind == 0 and shape[0] == self.batch:
            return self.input(shape[: self.number(1, len(shape))] if len(set(shape)) == 1 else shape, 1)
        if kind == 1 and same:
            return f"({self.one_of(same)} > 0.25)"
        rows = shape[-2] if len(shape) > 1 else 1
        return f"(torch.arange({rows})[:, None] >= torch.arange({shape[-1]}))" if rows > 1 else f"(torch.arange({shape[-1]}) % 3 > 0)"

    def input(self, shape: tuple[int, ...], limit: int) -> str:
        """An input of the same shape and limit, or a new one."""
        for name, known in self.inputs.items():
            if known == (shape, limit):
                return name
        name = f"x{len(self.inputs)}"
        self.inputs[name] = (shape, limit)
        self.names[name] = _values(name, shape, limit)
        return name

    def is_apart(self, expression: str) -> bool:
        """Whether all that `expression` yields is clearly not zero."""
        return bool((self.evaluate(expression).abs() > GAP).all())

    def are_distinct(self, name: str, dim: int) -> bool:
        """Whether no two values along `dim` are nearly equal."""
        return self.names[name].shape[dim] < 2 or self.is_apart(f"torch.diff({name}.sort({dim}).values, dim={dim})")

    # How the graph grows.

    def evaluate(self, expression: str) -> Tensor:
        owner = SimpleNamespace(training=True, **{name[5:]: value for name, value in self.names.items() if name.startswith("self.")})
        scope = {"torch": torch, "functional": functional, "self": owner, **self.names}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return eval(expression, scope)  # noqa: S307 — source that we wrote

    def keep(self, expression: str) -> str | None:
        """Give `expression` a name; None for a value that is too large to test with, in number of entries or in any entry."""
        value = self.evaluate(expression)
        if value.numel() > MAX_NUMEL or value.numel() == 0 or not bool((value.abs() < 1e3).all()):
            return None
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.names[name] = value
        self.kept.append(name)
        if "dropout" in expression or self.drawn & set(re.findall(r"\bv\d+\b", expression)):
            self.drawn.add(name)
        return name

    def finish(self) -> RandomGraph:
        """A loss of every value that nothing reads, through a sine: the sum of a softmax would be a constant."""
        text = "\n".join(self.lines)
        ends = [name for name in self.kept if name.startswith("v") and len(re.findall(rf"\b{name}\b", text)) == 1]
        terms = [f"torch.sin({name}).{self.one_of(('sum', 'mean'))}()" for name in ends]
        self.lines.append("return " + " + ".join(terms))
        inputs = tuple((name, shape, limit) for name, (shape, limit) in self.inputs.items())
        return RandomGraph(tuple(self.lines), tuple(self.shapes.items()), tuple(self.tied.items()), inputs)
