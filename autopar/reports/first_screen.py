"""What `explain()` says first, on one screen: what is split, how and why, what a step costs, what limits it, and what to try.

Never more than `MOST_LINES`. Every word of it that is not in a dictionary is explained on it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from autopar.driver.compiled import Compiled
from autopar.ir.mesh import MICROBATCHES, parent
from autopar.ir.program import Program
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.whole_batch import MicrobatchDecision
from autopar.reports.advice import advice_lines
from autopar.reports.axes import axis_lines
from autopar.reports.hardware import Hardware, hardware_of
from autopar.reports.kinds import AS_GOOD, Kind, kind_lines, kinds
from autopar.reports.step_parts import (
    ARITHMETIC,
    COMMUNICATION,
    COPIES,
    HANDOVER,
    STARTS,
    TRAFFIC,
    UPDATE,
    WAITS,
    StepParts,
    step_parts,
    where_time_goes,
)
from autopar.reports.summary import computed_in, flops, memory, op_seconds, replicated
from autopar.reports.zero import zero_lines

MOST_LINES = 40
_KINDS = 13
_WHOLE = 0.995
# What ranks repeat of other ops, of the time of all: below it is norms, losses and scalars, on which no plan turns.
_WORTH_A_WORD = 0.25
_LIMITS = {
    COMMUNICATION: "what ranks send each other",
    ARITHMETIC: "matmuls, convolutions, attention",
    TRAFFIC: "ops that read and write much and compute little",
    STARTS: "many ops, and small ones",
    COPIES: "what offload= moves, where nothing hides it",
    WAITS: "they are not equally busy, or there are too few microbatches",
    HANDOVER: "Python and autograd, a parameter and its gradient at a time",
    UPDATE: "the optimizer's, of every parameter that a rank holds",
}


def first_screen(compiled: Compiled, shares_process: bool = False) -> str:
    """`shares_process`: all ranks are in this one process, and take turns."""
    hardware = hardware_of(compiled)
    parts = step_parts(compiled, hardware.cost)
    found = kinds(compiled, hardware.is_ideal)
    above = [_heading(compiled, hardware), "", *axis_lines(compiled, hardware.cost), *_asked(compiled)]
    advice = list(advice_lines(compiled, hardware, parts))
    below = ["", *_step(compiled, hardware, parts, shares_process)]
    below += ["", "to try", *_indented(advice)] if advice else []
    below += ["", _more(found)]
    legend = list(_legend(found))
    prices = not all(each.others in ("", AS_GOOD) for each in found)
    title = ["", _parameters_title(found, hardware, prices)] if found else []
    most = min(_KINDS, MOST_LINES - len(above) - len(title) - len(legend) - len(below))
    return "\n".join((*above, *title, *_indented(kind_lines(found, most, prices)), *legend, *below))


def _more(found: list[Kind]) -> str:
    """How to ask on, with names of this model."""
    names = max(found, key=lambda each: each.num_elements).names if found else ("fc.weight",)
    module = names[0].rpartition(".")[0] or names[0]
    return f'more: explain("{module}"), explain(detail="all"), why(…), what_if({{…}}); docs/reading.md explains this page'


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _heading(compiled: Compiled, hardware: Hardware) -> str:
    """The mesh, and whether anything is computed twice."""
    program = compiled.program
    original, executed = flops(program)
    share = original / executed if executed else 1.0
    ranks = program.mesh.ranks
    axes = {axis: ranks.size_of(ranks.parts(axis)) for axis in dict.fromkeys(map(parent, ranks.names))}
    text = f"{' × '.join(f'{axis}={size}' for axis, size in axes.items())}, {ranks.size} ranks" if ranks.size > 1 else "one rank"
    if not original:
        return f"{text}: the model has no matmul, convolution or attention"
    if share >= _WHOLE:
        return f"{text}: all matmuls, convolutions and attention are split, {_repeated(program, hardware)}"
    entry = next((each for each in replicated(program, hardware.cost) if each["flops"] > 0), None)
    axes = [axis for axis in entry["axes"] if axis != MICROBATCHES] if entry else []
    padded = any(item.padding is not None for item in program.signature.inputs_of("parameter"))
    why = "; sizes that do not divide are padded" if padded else ""
    which = f", most of it {entry['op']} in {entry['module'] or 'the loss'}, the same along {', '.join(axes)}" if entry and axes else ""
    return f"{text}: ranks together do {1 / share:.3g} times the model's arithmetic{which}{why}"


def _repeated(program: Program, hardware: Hardware) -> str:
    """What of other ops ranks repeat, as far as it is worth a word."""
    entries = [each for each in replicated(program, hardware.cost) if set(each["axes"]) - {MICROBATCHES}]
    share = sum(each["seconds"] for each in entries) / (op_seconds(program, hardware.cost) or 1.0)
    if share < _WORTH_A_WORD:
        return "no rank repeats another's work"
    where = f"{entries[0]['op']} in {entries[0]['module'] or 'the loss'}"
    return f"others that ranks repeat take {share:.0%} of op time, most of it {where}"


def _asked(compiled: Compiled) -> Iterator[str]:
    """What else was decided or asked for that a reader must know: precision, ZeRO, a lower number of microbatches."""
    program = compiled.program
    if program.precision is not None:
        yield f"precision: {program.precision}"
    yield from itertools.islice(zero_lines(program), 2)
    for step in compiled.steps:
        if isinstance(step.decision, MicrobatchDecision):
            first = next(iter(step.decision.lines()), "")
            if first:
                yield f'microbatches: {first.rstrip(":")} (explain(detail="microbatches"))'


def _parameters_title(found: list[Kind], hardware: Hardware, prices: bool) -> str:
    split = next((match for each in found if (match := re.search(r"(\d+)@([^\s,\]]+)", each.where))), None)
    text = "where parameters lie" + (f" ({split[0]}: a dim of {split[1]} in all is in parts over {split[2]})" if split else "")
    if prices:
        return f"{text}, the next-best way, and what that would add to {'the work' if hardware.is_ideal else 'a step'} for all of the line"
    return f"{text}; other ways are as good where links are free" if hardware.is_ideal else text


def _legend(found: list[Kind]) -> Iterator[str]:
    words = " ".join(f"{each.how} {each.others}" for each in found)
    told = [
        text
        for word, text in (
            ("columns", "columns: each rank makes a part of what the layer returns"),
            ("rows", "rows: a summand of it, added up by communication"),
            ("in parts", "in parts: gathered before use"),
        )
        if word in words
    ]
    if told:
        yield f"  ({'; '.join(told)})"
    if within := re.search(r"within each \d+", words):
        yield f"  ({within[0]}: pieces of that size lie side by side, and each is cut for itself)"


def _step(compiled: Compiled, hardware: Hardware, parts: StepParts, shares_process: bool) -> Iterator[str]:
    program = compiled.program
    dtypes = computed_in(program)
    yield f"a step{f' in {dtypes}' if dtypes else ''} takes about {in_seconds(parts.total)} on {hardware.words}"
    yield "  " + ", ".join(f"{100 * share:.0f} % {name}{_number(parts, name)}" for name, share in parts.shown())
    limit, share = parts.largest
    yield f"  what limits it: {limit}, {100 * share:.0f} % ({_LIMITS[limit]})"
    places = [f"{name or 'outside of modules'} {100 * share:.0f} %" for name, share in where_time_goes(program, hardware.cost)[:3]]
    yield from [f"  time of ops, collectives aside: {', '.join(places)}"] if places else []
    ranks = program.mesh.ranks.size
    if shares_process and ranks > 1 and hardware.cost.cluster.device.name == "cpu":
        yield f"  here all {ranks} ranks take turns in one process: about {in_seconds(ranks * parts.total)}"
    held = memory(program, hardware.cost, compiled.order)
    each = ", ".join(f"{name.replace('_', ' ')} {in_bytes(size)}" for name, size in held.items() if size)
    whose = "a rank" if compiled.order.num_ranks < 2 else "the fullest rank"
    yield f"  {whose} holds {in_bytes(sum(held.values()))}: {each}"
    if math.isfinite(asked := compiled.budget.asked_bytes):
        yield f"  with what ops take meanwhile that is within memory_budget, {in_bytes(asked)}"
    if hardware.is_ideal:
        yield "  decided for an ideal cluster, whose links are free: whatever can be split is"
    elif compiled.search is not None and compiled.search.solution.is_timed_out:
        yield "  the search was stopped by search_timeout"


def _number(parts: StepParts, name: str) -> str:
    return f" ({parts.num_starts})" if name == STARTS else ""
