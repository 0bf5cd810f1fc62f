"""The original and every form of the program side by side on one call, down to the module's own run.

    original model  →  FORWARD  →  GLOBAL  →  LOCAL on every rank  →  the module's own run
      autograd        autograd     one device   node by node           its backend, its transport

Each is compared with the first. Where they part, the pass is found by bisection over the recorded programs, and the
node by comparing values: of a LOCAL node with those of the GLOBAL node that it is a part of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from autopar.compiled import Compiled
from autopar.keys import DIMS, ORIGIN, PHASE, SHARDING, SOURCE
from autopar.program import Form, Program
from autopar.promote import Promoting, default_float64, promote, promote_compiled, promote_model, promote_tensor
from autopar.runtime.inputs import CallInputs
from autopar.runtime.parameters import assemble, replica_difference
from autopar.runtime.replay import Case, Results, Stepper, origins, run_forward, run_global, run_local, run_original, tangents_of
from autopar.runtime.report import FLOOR, Difference, Report, error_of, norm

if TYPE_CHECKING:
    from autopar.runtime.module import ParallelModule

# The module's own run of a compile on a case: its results, and where an input did not arrive.
Run = Callable[[Compiled, Case], tuple[Results, Difference | None]]


def verify_compiled(
    model: nn.Module,
    compiled: Compiled,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    promote: bool = False,
    tolerance: float | None = None,
    key: int = 0,
    run: Run | None = None,
) -> Report:
    """Compare `model` with what was compiled from it, on inputs of global shape.

    `promote` does both in float64. `tolerance` is 1e-9 then and 1e-4 otherwise, unless given. `key` is the value of the
    program's random key. `run` adds the module's own run. Nothing of `model` changes. Needs memory for a copy of the model
    and for the activations of every rank.
    """
    return _Chain(model, compiled, args, kwargs, promote, tolerance, key).report(run)


@dataclass
class _Errors:
    """The largest errors so far."""

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict[str, float])
    buffers: dict[str, float] = field(default_factory=dict[str, float])
    replicas: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and whose it is."""
        found = [(self.loss, "loss")]
        for title, table in (("gradient of ", self.gradients), ("buffer ", self.buffers), ("replicas of ", self.replicas)):
            found += [(error, title + name) for name, error in table.items()]
        return max(found)

    def add(self, other: _Errors) -> None:
        self.loss = max(self.loss, other.loss)
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers), (self.replicas, other.replicas)):
            for name, error in theirs.items():
                mine[name] = max(mine.get(name, 0.0), error)


def errors_between(results: Results, wanted: Results) -> _Errors:
    """How far `results` are from `wanted`. A tied parameter may stand under several names in `wanted`."""
    outputs = [error_of(results.outputs.get(name), value) for name, value in wanted.outputs.items()]
    total = math.sqrt(sum(norm(value) ** 2 for value in wanted.gradients.values()))
    shared = {id(value): name for name, value in wanted.gradients.items() if name in results.gradients}
    gradients = {}
    for name, value in wanted.gradients.items():
        if name in results.gradients or id(value) not in shared:
            gradients[name] = error_of(results.gradients.get(name), value, FLOOR * total)
    for name in set(results.gradients) - set(wanted.gradients):
        gradients[name] = error_of(results.gradients[name], None, total)
    buffers = {name: error_of(results.buffers.get(name), value) for name, value in wanted.buffers.items()}
    return _Errors(max(outputs, default=0.0), gradients, buffers, dict(results.replica_errors))


class _Chain:
    def __init__(
        self,
        model: nn.Module,
        compiled: Compiled,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        promoted: bool,
        tolerance: float | None,
        key: int,
    ) -> None:
        self.promoted = promoted
        self.tolerance = (1e-9 if promoted else 1e-4) if tolerance is None else tolerance
        self.steps = compiled.steps
        self.compiled = promote_compiled(compiled) if promoted else compiled
        self.model, self.args, self.kwargs = model, args, kwargs
        self.training = bool(compiled.program.signature.outputs_of("gradient"))
        self.is_random = bool(compiled.forward.signature.inputs_of("random_key"))
        change = promote_tensor if promoted else _itself
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        self.case = Case(
            state={name: change(value.detach().cpu()) for name, value in state.items()},
            leaves=[change(leaf.detach().cpu()) if isinstance(leaf, torch.Tensor) else leaf for leaf in CallInputs.of(args, kwargs).leaves],
            key=key,
            tangents=tangents_of(self.compiled.forward.signature),
        )
        self.errors = _Errors()

    def report(self, run: Run | None) -> Report:
        with ExitStack() as stack:
            if self.promoted:
                stack.enter_context(default_float64())
            self.reference = self._reference()
            difference = self._compare_programs()
            if run is not None:
                difference = self._compare_run(run, difference)
        errors = self.errors
        reference = "forward program" if self.is_random else "original model"
        return Report(
            errors.loss, errors.gradients, self.tolerance, reference, self.promoted, errors.buffers, errors.replicas, difference
        )

    def _reference(self) -> Results:
        compiled = self.compiled
        if self.is_random:
            return run_forward(compiled.forward, self.case, self.training)
        originals = {id(value): self.case.state[name] for name, value in _named(self.model)}
        copied = promote_model(self.model, originals) if self.promoted else copy_of(self.model, originals)
        structure = CallInputs.of(self.args, self.kwargs)
        args, kwargs = structure.call(lambda index, tensor: self.case.leaves[index].clone())
        with ExitStack() as stack:
            if self.promoted:
                stack.enter_context(Promoting())
            return run_original(copied, args, kwargs, compiled.forward.signature, self.case, self.training)

    # ---- the programs

    def _compare_programs(self) -> Difference | None:
        """Compare FORWARD, GLOBAL and LOCAL with the reference; the first that differs is looked into."""
        compiled = self.compiled
        if not self.is_random and not self._agrees(run_forward(compiled.forward, self.case, self.training)):
            return self._made_by(compiled.forward)
        watcher = Watcher(compiled.program, compiled.local, self.case, self.tolerance)
        local = run_local(compiled.local, self.case, watcher)
        if not self._agrees(run_global(compiled.program, self.case)):
            return self._made_by(compiled.program)
        agrees = self._agrees(local)
        if watcher.found is not None and (not agrees or watcher.found.detail):
            step = self._lowering()
            return Difference(watcher.found.node, watcher.found.source, step, watcher.found.error, watcher.found.detail)
        return None if agrees else self._worst_result(local, self._lowering())

    def _agrees(self, results: Results) -> bool:
        errors = errors_between(results, self.reference)
        self.errors.add(errors)
        return errors.worst[0] <= self.tolerance

    def _lowering(self) -> str:
        return next((step.name for step in self.steps if step.program.form is Form.LOCAL), "lower")

    def _made_by(self, broken: Program) -> Difference:
        """Bisect the recorded programs for the first that differs from the reference."""
        steps = [step for step in self.steps if step.program.form is not Form.LOCAL]
        if broken.form is Form.FORWARD:
            steps = [step for step in steps if step.program.form is Form.FORWARD]
        low, high = -1, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            if errors_between(self._run(steps[middle].program), self.reference).worst[0] <= self.tolerance:
                low = middle
            else:
                high = middle
        if high == len(steps):
            # Every recorded program agrees: the last step's result is not what was handed on.
            before = steps[-1].program if steps else None
            return self._between(before, broken, "capture and forward passes" if broken.form is Form.FORWARD else "trace joint and global passes")
        before = steps[high - 1].program if high else None
        name = steps[high].name if high else f"capture or {steps[high].name}"
        return self._between(before, self._promoted(steps[high].program), name)

    def _promoted(self, program: Program) -> Program:
        return promote(program) if self.promoted else program

    def _run(self, program: Program) -> Results:
        program = self._promoted(program)
        return run_forward(program, self.case, self.training) if program.form is Form.FORWARD else run_global(program, self.case)

    def _between(self, before: Program | None, after: Program, name: str) -> Difference:
        """The first node of `after` that differs from the node of that name in `before`, where the pass kept names."""
        if before is not None and before.form is after.form:
            found = first_renamed(self._promoted(before), after, self.case, self.tolerance)
            if found is not None:
                return Difference(found.node, found.source, name, found.error)
        return self._worst_result(self._run_as_is(after), name)

    def _run_as_is(self, program: Program) -> Results:
        return run_forward(program, self.case, self.training) if program.form is Form.FORWARD else run_global(program, self.case)

    def _worst_result(self, results: Results, name: str) -> Difference:
        error, whose = errors_between(results, self.reference).worst
        return Difference(whose, "", name, error)

    # ---- the module's own run

    def _compare_run(self, run: Run, difference: Difference | None) -> Difference | None:
        results, misplaced = run(self.compiled, self.case)
        agrees = self._agrees(results)
        if difference is not None:
            return difference
        if misplaced is not None:
            return misplaced
        return None if agrees else self._worst_result(results, "runtime")


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
