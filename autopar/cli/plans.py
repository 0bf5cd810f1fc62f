"""Plans as `autopar plan --json` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.cli.answer import VERSION
from autopar.errors import InputError
from autopar.foresight.prediction import kinds_text
from autopar.ir.units import in_bytes, in_seconds

Values = dict[str, Any]
_KEYS = {
    "mesh", "schedule", "num_chunks", "num_microbatches", "microbatch", "zero", "recompute", "step_seconds", "seconds",
    "samples_per_second", "tokens_per_second_per_device", "mfu", "capacity_bytes", "memory_bytes", "fits", "stages", "reasons",
}  # fmt: skip


def read_plan(spec: str) -> Values:
    """That of "FILE", the first, or of "FILE:3". Raises `InputError` for what has none."""
    name, number = file_and_number(spec)
    values = read_file(name)
    if is_saved_plan(values):
        raise InputError(
            f"{name} is one that Plan.save wrote, which says nothing of seconds; autopar simulate {name} --model … --cluster … does"
        )
    if not isinstance(values, dict) or not isinstance(plans := values.get("plans"), list):
        raise InputError(f"{name} is no file that `autopar plan --json {Path(name).name}` wrote: it has no list of plans")
    if (found := values.get("version")) != VERSION:
        version = "says no version" if found is None else f"is of version {found!r}"
        raise InputError(f"{name} {version}, and this autopar reads version {VERSION}: write it anew with autopar plan")
    if not 0 < number <= len(plans):
        raise InputError(f"{name} has no plan {number}: it has {len(plans) or 'none'}")
    found = plans[number - 1]
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        missing = sorted(_KEYS - found.keys()) if isinstance(found, dict) else ["an object"]
        raise InputError(f"plan {number} of {name} is none that `autopar plan --json` wrote: it lacks {', '.join(missing[:3])}")
    if found["step_seconds"] is None:
        raise InputError(f"plan {number} of {name} has no seconds: it was made without --cluster")
    return found


def file_and_number(spec: str) -> tuple[str, int]:
    name, _, number = spec.rpartition(":")
    return (name, int(number)) if name and number.isdigit() else (spec, 1)


def read_file(name: str) -> Any:
    """The JSON of a file. Raises `InputError` for what is none."""
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{name} is no JSON, as autopar plan --json {Path(name).name} writes it: {error}") from None


def is_saved_plan(values: Any) -> bool:
    """Whether `Plan.save` wrote it."""
    return isinstance(values, dict) and "strategies" in values and "parameters" in values


def microbatches_text(number: int, samples: int) -> str:
    return f"{number} microbatch{'' if number == 1 else 'es'} of {samples}"


def title(plan: Values) -> str:
    mesh = " × ".join(f"{axis}{size}" for axis, size in plan["mesh"].items() if size > 1) or "1 device"
    microbatches = microbatches_text(plan["num_microbatches"], plan["microbatch"])
    away = "".join(f", {100 * share:.0f} % of {kind} on the host" for kind, share in plan.get("offload", {}).items())
    return f"{mesh}, {plan['schedule']}, {microbatches}, recompute {plan['recompute']}, zero {plan['zero']}{away}"


def explained(plan: Values) -> str:
    """Where time and memory go."""
    lines = [title(plan), f"  {in_seconds(plan['step_seconds'])} a step, MFU {100 * plan['mfu']:.1f} %"]
    for name, value in sorted(plan["seconds"].items(), key=lambda part: -part[1]):
        if value:
            lines.append(f"    {name:<16} {in_seconds(value):>9}  {100 * value / plan['step_seconds']:5.1f} %")
    lines.append(f"  memory, {'fits' if plan['fits'] else 'does not fit'}")
    for stage, held in enumerate(plan["memory_bytes"]):
        lines.append(f"    pp {stage}: {in_bytes(held['total'])}: {kinds_text(held)}")
    return "\n".join([*lines, *(f"  {reason}" for reason in plan["reasons"])])


def compared(one: Values, other: Values) -> str:
    """Part by part what the second takes more or less."""
    lines = [f"1: {title(one)}", f"2: {title(other)}", f"  {'':<16} {'1':>9} {'2':>9} {'2 − 1':>10}"]
    parts = [(name, one["seconds"].get(name, 0.0), other["seconds"].get(name, 0.0)) for name in {**one["seconds"], **other["seconds"]}]
    parts = [part for part in parts if any(part[1:])]
    for name, first, second in [*parts, ("step", one["step_seconds"], other["step_seconds"])]:
        lines.append(f"  {name:<16} {in_seconds(first):>9} {in_seconds(second):>9} {in_seconds(second - first, sign=True):>10}")
    first, second = (max(held["total"] for held in each["memory_bytes"]) for each in (one, other))
    lines.append(f"  {'memory':<16} {in_bytes(first):>9} {in_bytes(second):>9}")
    return "\n".join(lines)
