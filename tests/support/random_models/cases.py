"""A seed → a model, a mesh, options of `autopar.compile`, and the steps that are taken: what a test runs, and what it prints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.random_models.generate import MAX_CALLS, random_model
from tests.support.random_models.model import RandomModel
from tests.support.random_models.steps import Step, runs

_MESHES = (
    {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"tp": 4}, {"dp": 3}, {"tp": 3}, {"dp": 4}, {"pp": 2},
    {"pp": 2, "tp": 2},
)  # fmt: skip
_MESHES_OF_MICROBATCHES = ({"pp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 2})
_FEW_CALLS = 3
_SCHEDULES = ("gpipe", "zb-h1", "interleaved", "zb-v")


@dataclass(frozen=True)
class Case:
    model: RandomModel
    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: tuple[Step, ...] = (Step(1), Step(2))

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        steps = "\n# steps: " + "; ".join(map(str, self.steps))
        return f"{self.model}# autopar.compile(model, autopar.virtual_mesh({mesh}){options}){steps}"

    @property
    def command(self) -> str:
        """What runs it again."""
        backend = self.options["backend"]
        return f"python -m tests.support.random_models {self.model.seed}" + (f" --backend {backend}" if backend != "eager" else "")


def random_case(seed: int, backend: str = "eager") -> Case:
    """Every third one runs in microbatches, of a model that they do not change; every third one takes unequal batches and validates.

    By another backend than "eager", which takes seconds to compile, models are small.
    """
    draw = random.Random(f"case {seed}")
    in_microbatches = seed % 3 == 1
    model = random_model(seed, MAX_CALLS if backend == "eager" else _FEW_CALLS, by_sample=in_microbatches)
    mesh = draw.choice(_MESHES_OF_MICROBATCHES if in_microbatches else _MESHES)
    options = _options(draw, mesh, _num_microbatches(draw, model.batch // mesh.get("dp", 1)) if in_microbatches else None)
    if "'loss'" in model.lines[-1]:
        options |= {"outputs": "all"}
    return Case(model, mesh, {"backend": backend} | options, _unequal(model, draw) if seed % 3 == 0 else (Step(1), Step(2)))


def _options(draw: random.Random, mesh: Mapping[str, int], num_microbatches: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "dp" in mesh and draw.random() < 0.4:
        found["zero"] = draw.choice((1, 2, 3))
    if draw.random() < 0.3:
        found["recompute"] = draw.choice(("full", "selective"))
    if num_microbatches or "pp" in mesh:
        found["num_microbatches"] = num_microbatches or 1
    if "pp" in mesh and draw.random() < 0.4:
        found["schedule"] = draw.choice(_SCHEDULES)
    if "pp" not in mesh and draw.random() < 0.12:
        found["offload"] = "activations"
    if draw.random() < 0.2:
        found["kernels"] = draw.choice(("off", "triton", "aten"))
    return found


def _num_microbatches(draw: random.Random, share: int) -> int:
    """Mostly one that needs no padding, which many models do not take."""
    even = [number for number in (2, 3, 4) if share % number == 0]
    return draw.choice(even if even and draw.random() < 0.8 else (2, 3, 4))


def _unequal(model: RandomModel, draw: random.Random) -> tuple[Step, ...]:
    """A step, a validation, a step, one more: two of them on other numbers of samples, where the model takes these."""
    sizes = [size if runs(model, Step(1, size)) else None for size in (draw.randint(1, 9), draw.randint(1, 9))]
    accumulates = draw.random() < 0.5
    return (Step(1), Step(4, sizes[0], evaluates=True), Step(2, accumulates=accumulates), Step(3, sizes[1]))
