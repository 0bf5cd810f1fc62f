"""How far the results of one run are from those of another: the loss, each gradient, each buffer, and copies among ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.runtime.verify.limits import floor_of
from autopar.runtime.verify.reference_run import Case, Results
from autopar.runtime.verify.report import error_of, norm


@dataclass
class Errors:
    """The largest errors so far."""

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    buffers: dict[str, float] = field(default_factory=dict[str, float])
    replicas: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error, and whose it is."""
        found = [(self.loss, "loss")]
        for title, table in (("gradient of ", self.gradients), ("buffer ", self.buffers), ("replicas of ", self.replicas)):
            found += [(error, title + name) for name, error in table.items()]
        return max(found)

    def add(self, other: Errors) -> None:
        self.loss = max(self.loss, other.loss)
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers), (self.replicas, other.replicas)):
            for name, error in theirs.items():
                mine[name] = max(mine.get(name, 0.0), error)


def errors_between(results: Results, wanted: Results, case: Case, floor: float | None = None) -> Errors:
    """How far `results` are from `wanted`; a gradient that one of them lacks counts as zeros, a buffer as unchanged. `floor` as of
    `floor_of`, which it takes the place of."""
    outputs = [error_of(results.outputs.get(name), value) for name, value in wanted.outputs.items()]
    changed = dict.fromkeys([*wanted.buffers, *results.buffers])
    found, expected = ({name: side.buffers.get(name, case.state[name]) for name in changed} for side in (results, wanted))
    gradients, buffers = _errors_in(results.gradients, wanted.gradients, floor), _errors_in(found, expected, floor)
    return Errors(max(outputs, default=0.0), gradients, buffers, dict(results.replica_errors))


def _errors_in(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], floor: float | None) -> dict[str, float]:
    """The error of each, where one that should be zero by cancellation is measured by a share of them all, see `floor_of`."""
    scale = math.sqrt(sum(norm(value) ** 2 for value in wanted.values()))
    errors: dict[str, float] = {}
    for name in dict.fromkeys([*wanted, *found]):
        known = wanted[name] if name in wanted else found[name]
        errors[name] = error_of(found.get(name), wanted.get(name), (floor_of(known.dtype) if floor is None else floor) * scale)
    return errors


def joint_error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The error of all gradients together, as one vector."""
    gaps = [value.double() - found[name].double() if name in found else value.double() for name, value in wanted.items()]
    scale = math.sqrt(sum(norm(value) ** 2 for value in wanted.values()))
    return math.sqrt(sum(norm(gap) ** 2 for gap in gaps)) / scale if scale else 0.0
