"""A random model in float64 as readable source: what a seed stands for, and what a shrinker makes smaller."""

from __future__ import annotations

import linecache
import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

_NUMBER = count()


@dataclass(frozen=True)
class Kind:
    """Shape and sort of a tensor: whole numbers have a `limit` that they are below, floats 0, booleans 1, a counter that starts at 0 None.

    `trains` is of parameters.
    """

    shape: tuple[int, ...]
    limit: int | None = 0
    trains: bool = False

    def __str__(self) -> str:
        sort = {None: "counter", 0: "float64", 1: "bool"}.get(self.limit, f"int64 below {self.limit}")
        return f"{list(self.shape)} {sort}"

    def values(self, seed: int, name: str, step: int = 0) -> Tensor:
        """The same for the same seed, name and step; a string seeds by its digest, so that no two of them go together."""
        draw = torch.Generator().manual_seed(random.Random(f"{seed} {name} {step}").getrandbits(62))
        if self.limit is None:
            return torch.zeros(self.shape, dtype=torch.int64)
        if self.limit == 0:
            return torch.randn(self.shape, generator=draw, dtype=torch.float64)
        if self.limit == 1:
            return torch.rand(self.shape, generator=draw) > 0.4
        return torch.randint(0, self.limit, self.shape, generator=draw)


@dataclass(frozen=True)
class RandomModel:
    """`lines` are the body of forward. `tied` gives a parameter's second name.

    `batch` is how many samples dim 0 of an input counts, of those that begin so. `families` are the kinds of calls that were drawn.
    """

    seed: int
    lines: tuple[str, ...]
    parameters: Mapping[str, Kind]
    tied: Mapping[str, str]
    buffers: Mapping[str, Kind]
    inputs: Mapping[str, Kind]
    batch: int
    tolerance: float
    families: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return "\n    ".join((f"def forward(self, {', '.join(self.inputs)}):", *self.lines)) + "\n"

    @property
    def drops(self) -> bool:
        return "dropout" in self.source

    def __str__(self) -> str:
        parameters = [f"# self.{name}: {kind}{'' if kind.trains else ', frozen'}" for name, kind in self.parameters.items()]
        tied = [f"# self.{new} = self.{old}" for new, old in self.tied.items()]
        buffers = [f"# self.{name}: {kind}, a buffer" for name, kind in self.buffers.items()]
        inputs = [f"# {name}: {kind}" for name, kind in self.inputs.items()]
        return "\n".join((*parameters, *tied, *buffers, *inputs, self.source))

    def inputs_of(self, step: int, size: int | None = None) -> dict[str, Tensor]:
        """The batch of a step, of `size` samples where that is another number."""
        kinds = self.inputs
        if size is not None:
            kinds = {
                name: replace(kind, shape=(size, *kind.shape[1:])) if self.counts_samples(kind) else kind for name, kind in kinds.items()
            }
        return {name: kind.values(self.seed, name, step) for name, kind in kinds.items()}

    def counts_samples(self, kind: Kind) -> bool:
        return kind.shape[:1] == (self.batch,)

    def module(self) -> nn.Module:
        """A new one, always with the same values."""
        name = f"random model {next(_NUMBER)}"
        # Dynamo reads the lines of what it captures, errors show them.
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        exec(compile(self.source, name, "exec"), namespace)
        module = type("RandomModule", (nn.Module,), {"forward": namespace["forward"]})()
        for name, kind in self.parameters.items():
            module.register_parameter(name, nn.Parameter(kind.values(self.seed, name) * 0.7, requires_grad=kind.trains))
        for new, old in self.tied.items():
            module.register_parameter(new, module.get_parameter(old))
        for name, kind in self.buffers.items():
            module.register_buffer(name, kind.values(self.seed, name).abs())  # as a running variance has to be
        return module

    def of_lines(self, lines: Iterable[str]) -> RandomModel:
        """With another body, and without what that does not read."""
        kept = tuple(lines)
        names = set(re.findall(r"\w+", " ".join(kept)))
        tied = {new: old for new, old in self.tied.items() if new in names}
        names |= set(tied.values())
        parts = ({name: kind for name, kind in part.items() if name in names} for part in (self.parameters, self.buffers, self.inputs))
        parameters, buffers, inputs = parts
        return replace(self, lines=kept, parameters=parameters, tied=tied, buffers=buffers, inputs=inputs)

    def of_loss(self) -> RandomModel:
        """One that returns the loss alone."""
        return self.of_lines([*self.lines[:-1], "return loss"])
