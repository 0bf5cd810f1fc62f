"""The original and every form of the program side by side on one call, down to the module's own run.

    original model  →  FORWARD  →  GLOBAL  →  LOCAL on every rank  →  the module's own run
      autograd        autograd     one device   node by node           its backend, its transport

Each is compared with the first. Where they part, the pass is found by bisection over the recorded programs, and the
node by comparing values: of a LOCAL node with those of the GLOBAL node that it is a part of.

Where it is accepted that each microbatch takes its own statistics, the module's own run is another computation. It is then also
compared with LOCAL as its microbatches run it, each with its own, and from the buffers that the one before left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.driver.compiled import Compiled, PassRun
from autopar.driver.progress import progress
from autopar.graph.autocast import Autocast, autocast_off
from autopar.graph.promote import Promoting, default_float64, dtype_of, promote, promote_schedule, promote_tensor
from autopar.ir.program import Form, Program
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.verify.compare_values import ValueComparison, difference_at, first_renamed
from autopar.runtime.verify.copied_model import copy_model
from autopar.runtime.verify.errors import Errors, errors_between, joint_error
from autopar.runtime.verify.limits import Limits, floor_of, gradients_within, known
from autopar.runtime.verify.other_roundings import NUM_SAMPLES, RoundedOtherwise
from autopar.runtime.verify.reference_run import (
    Case,
    ReferenceRunError,
    Results,
    run_forward,
    run_global,
    run_local,
    run_original,
    run_separated,
    tangents_of,
)
from autopar.runtime.verify.report import Difference, Report, norm

logger = logging.getLogger("autopar")

# The module's own run of a compile on a case: the first value in it that differs by more than a tolerance, looked for when the
# results do not satisfy the predicate.
Run = Callable[[Compiled, Case, Callable[[Results], bool], float], Difference | None]


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

    `promote` does both in float64. `tolerance` is 1e-9 then and `own_tolerance` otherwise, unless given. `key` is the value of the
    program's random key. `run` adds the module's own run. Nothing of `model` changes. Needs memory for a copy of the model
    and for the activations of every rank.
    """
    asked = 1e-9 if promote and tolerance is None else tolerance
    limits = Limits.of(torch.float64 if promote else _narrowest(compiled), asked)
    with ExitStack() as stack:
        show = stack.enter_context(progress("verifying"))
        if promote:
            stack.enter_context(default_float64())
        show("the original")
        inputs = CallInputs.of(args, kwargs)
        forms = _Forms(model, compiled, inputs, promote, limits, key)
        stack.enter_context(autocast_off())  # the original has run under it
        if tolerance is None and _narrowest(compiled) == torch.float32:
            forms.in_other_dtype = lambda: _Forms(model, compiled, inputs, not promote, limits, key, forms.case.tangents)
        show("the program after each form, rank by rank")
        difference = forms.compare_programs()
        show("the module's own run")
        if run is not None:
            difference = forms.compare_run(run, difference)
    return forms.report(difference)


def case_of(model: nn.Module, inputs: CallInputs, key: int, tangents: Mapping[str, torch.Tensor], promoted: bool = False) -> Case:
    """One call of `model`, on the CPU."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().cpu()
        return promote_tensor(tensor) if promoted else tensor

    first_names = {id(value): name for name, value in model.named_parameters()}
    return Case(
        state={name: own(value) for name, value in named_values(model).items()},
        leaves=[own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs.leaves],
        first_names={name: first_names[id(value)] for name, value in model.named_parameters(remove_duplicate=False)},
        key=key,
        tangents=tangents,
    )


def _narrowest(compiled: Compiled) -> torch.dtype:
    """The floating-point dtype of fewest digits among the model's values, as captured, too: a fused op leaves out roundings of doubles."""
    programs = (compiled.forward, *(step.program for step in compiled.steps[:1]))
    values = (node.meta.get("val") for each in programs for node in each.graph.nodes)
    found = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


class _Forms:
    def __init__(
        self,
        model: nn.Module,
        compiled: Compiled,
        inputs: CallInputs,
        promoted: bool,
        limits: Limits,
        key: int,
        tangents: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.promoted, self.limits = promoted, limits
        self.steps = compiled.steps
        self.lowering = _lowering(compiled)
        self.compiled = promote_compiled(compiled) if promoted else compiled
        self.training = bool(compiled.program.signature.outputs_of("gradient"))
        self.is_random = bool(compiled.forward.signature.inputs_of("random_key"))
        # What runs here is on a CPU, where torch casts nothing for a GPU's autocast, nor for precision=. Promoted, no cast rounds.
        self.is_cast = not promoted and (compiled.forward.autocast not in (None, "cpu") or compiled.forward.precision is not None)
        self.is_captured = self.is_random or self.is_cast
        random = tangents_of(self.compiled.forward.signature) if tangents is None else tangents
        self.case = case_of(model, inputs, key, random, promoted)
        self.errors = Errors()
        self.own_errors = Errors() if compiled.separated is not None else None
        self.reference = self._scaled_reference(model, inputs)
        self.cast_error: float | None = None
        # In float64 what is compared in float32, and in float32 what is promoted; None where nothing more is measured.
        self.in_other_dtype: Callable[[], _Forms] | None = None
        # The reference once more, in a lower dtype, to learn how far other roundings take it; None where nothing more is measured.
        self.rounded_otherwise: Callable[[], Results] | None = None
        self.autocast, self.samples = Autocast.around("cpu"), list[Mapping[str, float]]()
        if not promoted and self.limits.is_low:
            self._measure_casts(model, compiled, inputs, key)
            self.rounded_otherwise = lambda: self._reference(model, inputs)
        self.measured = self.limits  # without other roundings

    def _scaled_reference(self, model: nn.Module, inputs: CallInputs) -> Results:
        """The reference; in float16 with the gradient of the loss from 2^16 down, as large as it can be: from 1 gradients would vanish."""
        losses = [item for item in self.compiled.forward.signature.outputs_of("loss") if item.requires_grad]
        if self.promoted or not losses or _narrowest(self.compiled) != torch.float16:
            return self._reference(model, inputs)
        tangents = dict(self.case.tangents)
        for scale in (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0):
            scaled = {item.name: torch.full(item.shape, scale, dtype=torch.float32) for item in losses}
            self.case = replace(self.case, tangents=tangents | scaled)
            reference = self._reference(model, inputs)
            if all(bool(each.isfinite().all()) for each in reference.gradients.values()):
                break
        return reference

    def _reference(self, model: nn.Module, inputs: CallInputs) -> Results:
        if self.is_captured:
            with autocast_off():
                return run_forward(self._captured(), self.case, self.training)
        return self._original(model, inputs)

    def _measure_casts(self, model: nn.Module, compiled: Compiled, inputs: CallInputs, key: int) -> None:
        """How far the lower dtype takes the reference from the original in float64, of whose draws it has the same."""
        with default_float64():
            exact = _Forms(model, compiled, inputs, True, self.limits, key, self.case.tangents)
        # Wide enough for the errors of what was rounded, and for the floors of what cancels.
        errors = errors_between(self.reference, exact.reference, exact.case, self.limits.floor)
        self.cast_error = errors.worst[0]
        together = joint_error(self.reference.gradients, exact.reference.gradients)
        self.limits = self.limits.beside(together, errors.loss, errors.gradients)

    def _original(self, model: nn.Module, inputs: CallInputs) -> Results:
        values = {id(value): self.case.state[name] for name, value in named_values(model).items()}
        copied = copy_model(model, values, promoted=self.promoted)
        args, kwargs = inputs.call(lambda index, tensor: self.case.leaves[index].clone())
        # In plain ops: torch's fused attention gives wrong gradients in rows that an added mask of numbers masks wholly.
        with ExitStack() as stack, sdpa_kernel(SDPBackend.MATH):
            if self.promoted:
                stack.enter_context(Promoting(dtype_of(model)))
            return run_original(copied, args, kwargs, self.compiled.forward.signature, self.case, self.training)

    def _captured(self) -> Program:
        """The program as it was captured, cast to its precision, its draws keyed and nothing else rewritten; where that is not known, the
        last of FORWARD."""
        forward = self.compiled.forward
        if self.compiled.keyed is None or not self.steps:
            return forward
        # Promoted, casts change nothing.
        captured = self._own(next(step.program for step in self.steps if step.program.precision == forward.precision))
        # Of a pipeline the loss alone is differentiated.
        return replace(captured, signature=replace(captured.signature, outputs=forward.signature.outputs))

    def report(self, difference: Difference | None) -> Report:
        return Report(
            loss_error=self.errors.loss,
            gradient_errors=self.errors.gradients,
            tolerance=self.limits.tolerance,
            gradient_tolerance=self.limits.gradients,
            gradient_limits=self.limits.by_gradient,
            cast_tolerance=self.limits.casts,
            cast_loss_error=self.limits.cast_loss_error,
            reference="forward program" if self.is_captured else "original model",
            is_random=self.is_random,
            cast_error=self.cast_error,
            promoted=self.promoted,
            buffer_errors=self.errors.buffers,
            replica_errors=self.errors.replicas,
            first_difference=difference,
            narrowest=_narrowest(self.compiled),
            num_detached=sum(item.is_detached for item in self.compiled.forward.signature.outputs),
            own_statistics_error=self.own_errors.worst[0] if self.own_errors is not None else None,
            without_numbers=self.reference.without_numbers(self.compiled.forward.signature),
            has_numbers=self.reference.has_numbers,
        )

    def agrees(self, results: Results) -> bool:
        """Whether `results` are the reference's; their errors are kept for the report."""
        errors = self._errors(results)
        self.errors.add(errors)
        return self._are_within(errors)

    def _are_within(self, errors: Errors) -> bool:
        if not self._are_within_limits(errors) and self.in_other_dtype is not None:
            in_other_dtype, self.in_other_dtype = self.in_other_dtype, None
            try:
                self.limits = self._beside_rounding(in_other_dtype)
            except Exception as error:  # a kernel of the user's that knows one dtype alone: nothing is allowed besides
                logger.debug("how far rounding takes the original is not known: %s", error)
        while self.rounded_otherwise is not None and not (self._is_cast_within_limits() and self._are_within_limits(errors)):
            self._take_sample(self.rounded_otherwise)
        return self._are_within_limits(errors)

    def _is_cast_within_limits(self) -> bool:
        return self.cast_error is None or known(self.cast_error) <= self.limits.casts

    def _beside_rounding(self, in_other_dtype: Callable[[], _Forms]) -> Limits:
        """The limits beside what rounding in float32 does to the original's own gradients, for one more run of it."""
        with default_float64(not self.promoted):
            other = in_other_dtype()
        rounded, exact = (other, self) if self.promoted else (self, other)
        coarse, fine = torch.float32, torch.float64
        errors = errors_between(rounded.reference, exact.reference, exact.case, floor_of(fine if self.promoted else coarse))
        finer = torch.finfo(fine).eps / torch.finfo(coarse).eps if self.promoted else 1.0
        return self.limits.beside_rounding(errors.gradients, finer, _vanishing(rounded.reference.gradients, exact.reference.gradients))

    def _take_sample(self, run: Callable[[], Results]) -> None:
        """Limits beside what other roundings do to the reference's gradients, for one more run of it; there are so many at most."""
        with RoundedOtherwise(len(self.samples)), _under(self.autocast):
            self.samples.append(errors_between(run(), self.reference, self.case, self.limits.floor).gradients)
        self.limits = self.measured.beside_other_roundings(self.samples)
        if len(self.samples) == NUM_SAMPLES:
            self.rounded_otherwise = None

    def _are_within_limits(self, errors: Errors) -> bool:
        rest = replace(errors, gradients={})
        are_within = gradients_within(errors.gradients, self.limits.gradients, self.limits.by_gradient)
        return rest.worst[0] <= self.limits.tolerance and are_within

    def _errors(self, results: Results) -> Errors:
        errors = errors_between(results, self.reference, self.case, self.limits.floor)
        if self.compiled.separated is not None:
            errors.buffers.clear()  # they are written as those of a microbatch
        return errors

    # ---- the programs

    def compare_programs(self) -> Difference | None:
        """Compare FORWARD, GLOBAL and LOCAL with the reference; the first that differs is looked into."""
        compiled = self.compiled
        if not self.agrees(run_forward(compiled.forward, self.case, self.training)):
            return self._made_before(compiled.forward, "capture and forward passes")
        comparison = ValueComparison(compiled.program, compiled.local, self.case, self.limits.tolerance)
        local, failure = self._local(comparison)
        try:
            is_right = self.agrees(comparison.stepper.results())
        except ReferenceRunError as error:
            return replace(difference_at(error.node, math.inf, str(error)), made_by="trace joint and the passes after it")
        if not is_right:
            return self._made_before(compiled.program, "trace joint and the passes after it")
        if local is None:
            assert failure is not None
            return replace(failure, made_by=self.lowering)
        agrees = self.agrees(local)
        if comparison.found is not None and (not agrees or comparison.found.detail):
            return replace(comparison.found, made_by=self.lowering)
        return None if agrees else self._worst(local, self.lowering)

    def _local(self, comparison: ValueComparison) -> tuple[Results | None, Difference | None]:
        """What LOCAL yields, or the node that cannot run."""
        try:
            return run_local(self.compiled.local, self.case, comparison), None
        except ReferenceRunError as error:
            return None, comparison.found or difference_at(error.node, math.inf, str(error))

    def _made_before(self, broken: Program, otherwise: str) -> Difference:
        """Bisect the recorded programs up to the form of `broken` for the first that differs from the reference.

        When every recorded one agrees, what was handed on is not what the last pass made; `otherwise` names the culprit then.
        """
        forms = (Form.FORWARD,) if broken.form is Form.FORWARD else (Form.FORWARD, Form.GLOBAL)
        steps = [step for step in self.steps if step.form in forms]
        first = self._first_broken(steps)
        before = self._own(steps[first - 1].program) if first else None
        if first == len(steps):
            return self._between(before, broken, otherwise)
        name = steps[first].name
        return self._between(before, self._own(steps[first].program), name)

    def _first_broken(self, steps: list[PassRun]) -> int:
        low, high = -1, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            errors = self._errors(self._run(self._own(steps[middle].program)))
            low, high = (middle, high) if self._are_within(errors) else (low, middle)
        return high

    def _own(self, program: Program) -> Program:
        """A recorded program as it is compared: its draws keyed, and promoted as all else."""
        if self.compiled.keyed is not None and self.is_random and program.form is Form.FORWARD:
            program = self.compiled.keyed(program)
        return promote(program) if self.promoted else program

    def _run(self, program: Program) -> Results:
        return run_forward(program, self.case, self.training) if program.form is Form.FORWARD else run_global(program, self.case)

    def _between(self, before: Program | None, after: Program, name: str) -> Difference:
        """The first node of `after` that differs from the node of that name in `before`; passes keep the names of what they keep."""
        if before is not None and before.form is after.form:
            found = first_renamed(before, after, self.case, self.limits.tolerance)
            if found is not None:
                return replace(found, made_by=name)
        return self._worst(self._run(after), name)

    def _worst(self, results: Results, name: str) -> Difference:
        error, whose = self._errors(results).worst
        return Difference(whose, "", name, error)

    # ---- the module's own run

    def compare_run(self, run: Run, difference: Difference | None) -> Difference | None:
        """Run the module itself; a difference that the programs have already comes first."""
        if self.own_errors is None:
            return difference or run(self.compiled, self.case, self.agrees, self.limits.tolerance)
        assert self.compiled.separated is not None
        wanted, own_errors = run_separated(self.compiled.separated, self.case), self.own_errors

        def agrees(results: Results) -> bool:
            self.errors.add(errors_between(results, self.reference, self.case, self.limits.floor))
            errors = errors_between(results, wanted, self.case, self.limits.floor)
            errors.buffers.clear()  # the last microbatch's, which no run side by side shows
            own_errors.add(errors)
            return self._are_within(errors)

        return difference or run(self.compiled, self.case, agrees, self.limits.tolerance)


def _lowering(compiled: Compiled) -> str:
    """The passes that made LOCAL, as far as it is compared: one, unless more were put behind it."""
    made = [step for step in compiled.steps if step.form is Form.LOCAL]
    last = next((number for number, step in enumerate(made) if step.held is compiled.local), 0)
    return " or ".join(step.name for step in made[: last + 1]) or "lower"


def named_values(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def promote_compiled(compiled: Compiled) -> Compiled:
    """Every program that runs, promoted; `steps` stay as they were."""
    forms = compiled.with_forms(
        forward=promote(compiled.forward),
        program=promote(compiled.program),
        local=promote(compiled.local),
        separated=compiled.separated and promote(compiled.separated),
    )
    return replace(forms, schedule=promote_schedule(compiled.schedule))


def _under(autocast: Autocast | None) -> AbstractContextManager[object]:
    return nullcontext() if autocast is None else torch.autocast("cpu", autocast.dtype, cache_enabled=autocast.caches)


def _vanishing(rounded: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> list[str]:
    """The gradients that are zero but for rounding: of a bias in front of a batch norm."""
    return [name for name, value in rounded.items() if name in exact and norm(exact[name]) < 1e-3 * norm(value)]
