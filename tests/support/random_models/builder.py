"""A random model as far as it is drawn. Every call is run as it is drawn, so that shapes are known and values stay small."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.random_models.model import Kind, RandomModel

Shape = tuple[int, ...]
# Those that most meshes divide are there twice, some that they do not once.
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8)
_MAX_NUMEL, _MAX_VALUE = 1200, 1e4


class Unfit(Exception):
    """A call that cannot be drawn here."""


def need(condition: bool) -> None:
    if not condition:
        raise Unfit


@dataclass
class Builder:
    """The lines so far, and the value of each of their names.

    `kept` are floats that later calls may read. With `by_sample` no call is drawn that mixes samples: a model that microbatches do
    not change.
    """

    seed: int
    draw: random.Random
    batch: int
    by_sample: bool
    lines: list[str] = field(default_factory=list[str])
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    kept: list[str] = field(default_factory=list[str])
    parameters: dict[str, Kind] = field(default_factory=dict[str, Kind])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    buffers: dict[str, Kind] = field(default_factory=dict[str, Kind])
    inputs: dict[str, Kind] = field(default_factory=dict[str, Kind])
    num_names: int = 0
    tolerance: float = 1e-9

    # ---- choices

    def one_of(self, choices: Sequence[Any]) -> Any:
        need(len(choices) > 0)
        return self.draw.choice(choices)

    def chance(self, probability: float = 0.5) -> bool:
        return self.draw.random() < probability

    def number(self, least: int, most: int) -> int:
        need(least <= most)
        return self.draw.randint(least, most)

    def fill(self, form: str, **fields: Any) -> str:
        """`form` with its fields; those that are functions are called where the form has them, so that no operand is made for nothing."""
        used = {name: value for name, value in fields.items() if f"{{{name}}}" in form}
        return form.format(**{name: value() if callable(value) else value for name, value in used.items()})

    def form(self, forms: Sequence[str], **fields: Any) -> str:
        return self.fill(self.one_of(forms), **fields)

    # ---- operands

    def shape(self, name: str) -> Shape:
        return tuple(self.values[name].shape)

    def tensor(self, fits: Callable[[Shape], bool] = lambda _: True) -> str:
        """A float that is there, half of the time the latest."""
        choices = [name for name in self.kept if fits(self.shape(name))]
        need(len(choices) > 0)
        return choices[-1] if self.chance() else self.one_of(choices)

    def dim(self, name: str, fits: Callable[[int], bool] = lambda _: True) -> int:
        return self.one_of([dim for dim, size in enumerate(self.shape(name)) if fits(size)])

    def of_shape(self, shape: Shape) -> list[str]:
        return [name for name in self.kept if self.shape(name) == shape]

    def new_name(self) -> str:
        self.num_names += 1
        return f"v{self.num_names}"

    def parameter(self, *shape: int) -> str:
        """A new parameter, an old one, perhaps by a second name, an old one transposed, or a view of a larger one."""
        need(math.prod(shape) <= _MAX_NUMEL)
        same = [name for name, kind in self.parameters.items() if kind.shape == shape]
        turned = [name for name, kind in self.parameters.items() if len(shape) == 2 and kind.shape == shape[::-1]]
        if same and self.chance(0.3):
            return self._tied(self.one_of(same)) if self.chance(0.3) else f"self.{self.one_of(same)}"
        if turned and self.chance(0.3):
            return f"self.{self.one_of(turned)}.t()"
        if self.chance(0.1):
            numel = math.prod(shape)
            return f"self.{self._new_parameter((numel + 3,), True)}[2:{numel + 2}].view({list(shape)})"
        return f"self.{self._new_parameter(shape, not self.chance(0.1))}"

    def _tied(self, old: str) -> str:
        new = f"q{len(self.tied)}"
        self.tied[new] = old
        self.values[f"self.{new}"] = self.values[f"self.{old}"]
        return f"self.{new}"

    def _new_parameter(self, shape: Shape, trains: bool) -> str:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = Kind(shape, trains=trains)
        self.values[f"self.{name}"] = self.parameters[name].values(self.seed, name).requires_grad_(trains)
        return name

    def buffer(self, shape: Shape, limit: int | None = 0) -> str:
        name = f"b{len(self.buffers)}"
        self.buffers[name] = Kind(shape, limit)
        self.values[f"self.{name}"] = self.buffers[name].values(self.seed, name).abs()
        return f"self.{name}"

    def input(self, shape: Shape, limit: int = 0) -> str:
        """An old input of the same kind, or a new one. Dim 0 counts samples."""
        same = [name for name, kind in self.inputs.items() if kind == Kind(shape, limit)]
        if same and self.chance():
            return self.one_of(same)
        name = f"{'x' if limit == 0 else 'i'}{len(self.inputs)}"
        self.inputs[name] = Kind(shape, limit)
        self.values[name] = self.inputs[name].values(self.seed, name)
        return name

    def ids(self, shape: Shape, limit: int) -> str:
        """Whole numbers from 0 up to below `limit`: an input, of positions, of a float's values, or where a float is greatest."""
        kinds = ["input"] * 3 if shape[:1] == (self.batch,) and limit > 1 else []
        floats = self.of_shape(shape)
        greatest = [
            (name, dim)
            for name in self.kept
            for dim, size in enumerate(self.shape(name))
            if size <= limit and self.shape(name)[:dim] + self.shape(name)[dim + 1 :] == shape
        ]
        kind = self.one_of([*kinds, "positions", *["float"] * bool(floats), *["greatest"] * bool(greatest)])
        if kind == "input":
            return self.input(shape, limit)
        if kind == "positions":
            step, start = self.one_of((1, 2, 3, 5)), self.number(0, 2)
            return f"((torch.arange({math.prod(shape)}) * {step} + {start}) % {limit}).reshape({list(shape)})"
        if kind == "float":
            return f"(({self.one_of(floats)}.detach().abs() * 10).long() % {limit})"
        name, dim = self.one_of(greatest)
        return f"{name}.{self.one_of(('argmax', 'argmin'))}({dim})"

    def mask(self, shape: Shape) -> str:
        """A boolean that broadcasts to `shape`: an input, a comparison, or of positions."""
        floats = self.of_shape(shape)
        kind = self.one_of([*["input"] * (shape[:1] == (self.batch,)), "positions", *["float"] * bool(floats)])
        if kind == "input":
            return self.input((self.batch, *(size if self.chance(0.7) else 1 for size in shape[1:])), 1)
        if kind == "float":
            return f"({self.one_of(floats)} > {self.one_of((0, 0.3, -0.5))})"
        part = shape[self.number(0, len(shape)) :]
        return f"(torch.arange({math.prod(part)}) % {self.one_of((2, 3))} == {self.number(0, 1)}).reshape({list(part)})"

    def broadcast(self, shape: Shape) -> str:
        """A float, a parameter or a number that broadcasts to `shape`."""
        same = self.of_shape(shape)
        fitting = [name for name in self.kept if self.shape(name) and _broadcasts(self.shape(name), shape)]
        for choices in (same, fitting):
            if choices and self.chance():
                return self.one_of(choices)
        if self.chance(0.2):
            return self.one_of(("0.5", "-1.5", "2"))
        return self.parameter(*(size if self.chance(0.7) else 1 for size in shape[self.number(0, len(shape)) :]))

    # ---- growth

    def keep(self, expression: str) -> str:
        """Give `expression` a name."""
        name = self.new_name()
        self.add([f"{name} = {expression}"], [name])
        return name

    def add(self, lines: Sequence[str], kept: Sequence[str]) -> None:
        """Run `lines` and take them. Raises `Unfit` where torch refuses them, or a value of `kept` is too large to test with."""
        try:
            self._run(lines)
            need(all(_is_fit(self.values.get(name)) for name in kept))
            need(not self.by_sample or self._keeps_samples_apart(lines, kept))
        except Exception as error:  # whatever torch raises
            raise Unfit(str(error)) from error
        self.lines += lines
        self.kept += kept

    def _run(self, lines: Sequence[str]) -> None:
        owner = SimpleNamespace(training=True, **{name[5:]: value for name, value in self.values.items() if name.startswith("self.")})
        scope: dict[str, Any] = {"torch": torch, "F": F, "math": math, "self": owner}
        scope |= {name: value for name, value in self.values.items() if not name.startswith("self.")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            exec("\n".join(lines), scope)
        self.values |= {name: value for name, value in scope.items() if isinstance(value, Tensor)}

    def _keeps_samples_apart(self, lines: Sequence[str], kept: Sequence[str]) -> bool:
        """Whether the results of samples move along with them, and other values of one show in none of the others, nor in buffers."""
        model = self.model([*self.lines, *lines, f"return [{', '.join(kept)}]"])
        before, moved, others = model.inputs_of(1), model.inputs_of(1), model.inputs_of(2)
        for name, kind in model.inputs.items():
            if model.counts_samples(kind):
                moved[name] = torch.cat([others[name][:1], before[name][:-1]])
        module, second = model.module(), model.module()
        with torch.no_grad():
            pairs = list(zip(module(**before), second(**moved), strict=True))
        apart = [(a[:-1], b[1:]) if a.shape[:1] == (self.batch,) else (a, b) for a, b in pairs]
        apart += zip(module.buffers(), second.buffers(), strict=True)
        return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True) for a, b in apart)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Whatever a call that turns out unfit has drawn is forgotten."""
        before = {name: copy(value) for name, value in vars(self).items() if name != "draw"}
        try:
            yield
        except Unfit:
            vars(self).update(before)

    def model(self, lines: Sequence[str], families: Sequence[str] = ()) -> RandomModel:
        drawn = RandomModel(
            self.seed, (), self.parameters, self.tied, self.buffers, self.inputs, self.batch, self.tolerance, tuple(families)
        )
        return drawn.of_lines(lines)


def _broadcasts(shape: Shape, target: Shape) -> bool:
    return len(shape) <= len(target) and all(size in (1, other) for size, other in zip(shape[::-1], target[::-1], strict=False))


def _is_fit(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.float64
        and 0 < value.numel() <= _MAX_NUMEL
        and value.dim() <= 5
        and bool(torch.isfinite(value).all())
        and float(value.detach().abs().max()) <= _MAX_VALUE
    )
