"""What to try next, from what limits the step: at most a few lines, the most promising first. Each says what it is about to change, by the
numbers of the plan at hand; what it really changes another compile says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.driver.compiled import Compiled
from autopar.ir.keys import BATCH
from autopar.ir.mesh import parent
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.guessed_batch import may_be_other, other_batch
from autopar.partition.whole_batch import MicrobatchDecision
from autopar.pipeline.report import StepOnPaper
from autopar.reports.axes import work_share
from autopar.reports.communication import transfers
from autopar.reports.entries import Replicated
from autopar.reports.hardware import Hardware
from autopar.reports.step_parts import ARITHMETIC, COMMUNICATION, STARTS, WAITS, StepParts
from autopar.reports.summary import memory, replicated

_MOST = 4
# A part of the step or of the memory that is worth a word.
_MUCH, _SOME = 0.25, 0.1
_GIGABYTE = 1e9


@dataclass(frozen=True)
class Advice:
    """`weight` is about the share of the step, or of the memory, that it is about."""

    weight: float
    text: str


def advice_lines(compiled: Compiled, hardware: Hardware, parts: StepParts) -> Iterator[str]:
    """The most promising first."""
    situation = _Situation(compiled, hardware, parts)
    found = [advice for look in _LOOKS for advice in look(situation)]
    yield from (each.text for each in sorted(found, key=lambda each: -each.weight)[:_MOST])


@dataclass(frozen=True)
class _Situation:
    compiled: Compiled
    hardware: Hardware
    parts: StepParts

    @cached_property
    def memory(self) -> dict[str, float]:
        return memory(self.compiled.program, self.hardware.cost, self.compiled.order)

    @cached_property
    def trains(self) -> bool:
        return bool(self.compiled.program.signature.outputs_of("gradient"))

    def size(self, axis: str) -> int:
        mesh = self.compiled.program.mesh
        return mesh.size_of(mesh.parts(axis))

    @cached_property
    def numbers(self) -> list[MicrobatchDecision]:
        """Of microbatches: what was decided, and why."""
        return [step.decision for step in self.compiled.steps if isinstance(step.decision, MicrobatchDecision)]

    @cached_property
    def batch_size(self) -> int:
        """Samples of a step; 0 where nothing has a batch dim."""
        found = [item.shape[item.batch_dim] for item in self.compiled.program.signature.inputs_of("batch") if item.batch_dim is not None]
        return found[0] if found else 0


def _unused_axes(at: _Situation) -> Iterator[Advice]:
    mesh = at.compiled.program.mesh
    for axis in dict.fromkeys(map(parent, mesh.ranks.names)):
        size = at.size(axis)
        if axis in ("pp", "dp") or size == 1 or work_share(at.compiled.program, axis):
            continue
        ranks = size * at.size("dp")
        fits = at.batch_size and at.batch_size % ranks == 0
        instead = f"dp={ranks} in place of dp={at.size('dp')} × {axis}={size}" if fits else f"{axis}=1: fewer ranks do it as quickly"
        yield Advice(1.0, f"{instead}: all {size} ranks along {axis} do the same work")


def _another_batch(at: _Situation) -> Iterator[Advice]:
    """Where the samples that were guessed are split by no axis, are gathered again, or not cut into microbatches: the dim that can be,
    which is tried."""
    program = at.compiled.program
    axes = [axis for axis in dict.fromkeys(map(parent, program.mesh.ranks.names)) if program.freedom.is_batch(axis) and at.size(axis) > 1]
    is_refused = any(each.number < each.wanted and each.found for each in at.numbers)
    if not may_be_other(program) or not (is_refused or any(not work_share(program, axis) or _is_gathered(at, axis) for axis in axes)):
        return
    before = next((step.program for step in at.compiled.steps if step.name == "find atoms"), None)
    other = None if before is None else other_batch(before)
    if other is not None:
        yield Advice(1.0, f"{other.option}, if dim 1 of the inputs ({other.size}) is the batch, as where time comes first: no op mixes it")


def _is_gathered(at: _Situation, axis: str) -> bool:
    """Whether the forward puts samples together, or goes across them, that `axis` splits: attention, where they are positions."""
    return any(
        each.phase == "forward" and each.collective in ("all_gather", "all_to_all") and axis in each.axes.split("·")
        for each in transfers(at.compiled.program, at.hardware.cost)
        if any(BATCH.get(each.node) or ())
    )


def _repeated_work(at: _Situation) -> Iterator[Advice]:
    entries: list[Replicated] = [each for each in replicated(at.compiled.program, at.hardware.cost) if each["module"]]
    if not entries or not at.parts.total:
        return
    worst = entries[0]
    share = worst["seconds"] / at.parts.total
    axes = [axis for axis in worst["axes"] if axis not in ("pp", "mb") and work_share(at.compiled.program, axis)]
    if axes and share >= _SOME:
        where = f"{worst['op']} in {worst['module']}"
        yield Advice(
            share, f"why({worst['module']!r}): {where} is the same on every rank along {', '.join(axes)}, {100 * share:.0f} % of the step"
        )


def _waits(at: _Situation) -> Iterator[Advice]:
    order, share = at.compiled.order, at.parts.share(WAITS)
    if order.num_ranks < 2 or share < _SOME:
        return
    more = order.num_microbatches * 2
    refused = any(each.found for each in at.numbers)
    if not refused and share > at.parts.share(STARTS) and at.batch_size and at.batch_size % (more * at.size("dp")) == 0:
        yield Advice(share, f"num_microbatches={more}: stages wait less for each other with more, smaller microbatches")
    if order.name == "1f1b":
        yield Advice(0.9 * share, 'schedule="zb-h1": fills waits with gradients of weights; "auto" looks for the best order')
    stages = StepOnPaper(at.compiled.program, at.hardware.cost, order).prices.stages
    takes = [each.forward_seconds + each.input_gradient_seconds + each.weight_gradient_seconds for each in stages]
    if max(takes) > 1.3 * sum(takes) / len(takes):
        slowest = takes.index(max(takes))
        yield Advice(
            0.8 * share, f"fewer stages (pp): stage {slowest} takes {max(takes) / (sum(takes) / len(takes)):.1f} times the mean of them"
        )


def _precision(at: _Situation) -> Iterator[Advice]:
    program, share = at.compiled.program, at.parts.share(ARITHMETIC)
    device = at.hardware.cost.cluster.device
    if program.precision is not None or share < _MUCH or not at.trains or _computes_low(at.compiled):
        return
    gain = device.flops_per_second(torch.bfloat16) / device.flops_per_second(torch.float32)
    if gain > 1.2:
        yield Advice(
            share * (1 - 1 / gain),
            f'precision="bf16": arithmetic is {100 * share:.0f} % of the step, and {gain:.1f} times as quick in bfloat16',
        )


def _computes_low(compiled: Compiled) -> bool:
    values = (node.meta.get("val") for node in compiled.program.graph.nodes)
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bfloat16, torch.float16) for each in values)


def _zero(at: _Situation) -> Iterator[Advice]:
    total, state, size = sum(at.memory.values()), at.memory.get("optimizer_state", 0.0), at.size("dp")
    if not total or size < 2 or at.compiled.program.freedom.shards_parameters:
        return
    share = total / at.hardware.cost.cluster.device.memory_bytes
    if share >= _SOME and state >= _MUCH * total:
        text = f"zero=1: optimizer state in parts over dp, {in_bytes(state / size)} a rank where it is {in_bytes(state)}"
        yield Advice(min(share, 1.0), text)


def _communication(at: _Situation) -> Iterator[Advice]:
    for axis in ("dp", "tp"):
        names = [name for name in at.parts.parts if name.startswith(COMMUNICATION) and axis in name]
        share = sum(map(at.parts.share, names))
        several = ", all in all" if len(names) > 1 else ""
        if share < _MUCH:
            continue
        if axis == "dp":
            yield Advice(share, f"a larger batch: what goes over dp, {100 * share:.0f} % of the step{several}, does not grow with it")
            zero = at.compiled.program.freedom.zero
            if zero is not None and zero.level == 3:
                yield Advice(0.9 * share, "zero=2: parameters are gathered once a step, where level 3 gathers them for each phase")
        elif at.size("tp") > 1:
            fits = at.batch_size % (2 * at.size("dp")) == 0
            instead = f"dp={2 * at.size('dp')}, tp={at.size('tp') // 2}" if fits and at.size("tp") % 2 == 0 else "fewer ranks along tp"
            yield Advice(share, f"{instead}: communication over tp is {100 * share:.0f} % of the step{several}")


def _starts(at: _Situation) -> Iterator[Advice]:
    share, number = at.parts.share(STARTS), at.parts.num_starts
    if share >= _MUCH:
        yield Advice(share, f"a larger batch or wider layers: {100 * share:.0f} % of the step goes into starting {number} ops of any size")


def _budget(at: _Situation) -> Iterator[Advice]:
    search = at.compiled.search
    if search is None or search.solution.seconds_per_byte <= 0:
        return
    asked = at.compiled.budget.asked_bytes  # not what the search was left of it
    if math.isfinite(asked) and search.solution.seconds:
        more = 0.1 * asked
        share = min(more * search.solution.seconds_per_byte / search.solution.seconds, 1.0)
        seconds = "" if at.hardware.is_ideal else f", about {in_seconds(more * search.solution.seconds_per_byte)} {search.per}"
        yield Advice(
            max(share, _SOME),
            f"memory_budget={in_bytes(asked + more)!r}: a tenth more would save {100 * share:.1f} % of the step{seconds}",
        )


def _search(at: _Situation) -> Iterator[Advice]:
    search = at.compiled.search
    if search is not None and search.solution.is_timed_out:
        yield Advice(search.gap if math.isfinite(search.gap) else 1.0, "a longer search_timeout: the search was stopped before it was done")


def _real_links(at: _Situation) -> Iterator[Advice]:
    if at.hardware.is_ideal:
        yield Advice(0.05, 'cluster="8xH100" (or "cpu", or a file of yours): decides with links that cost something; here they are free')


_LOOKS: tuple[Callable[[_Situation], Iterator[Advice]], ...] = (
    _unused_axes,
    _another_batch,
    _repeated_work,
    _waits,
    _precision,
    _zero,
    _communication,
    _starts,
    _budget,
    _search,
    _real_links,
)
