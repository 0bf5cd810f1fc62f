"""Plans as `autopar plan --json` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.ir.units import in_bytes, in_seconds

Values = dict[str, Any]
_KEYS = {
    "mesh", "schedule", "num_microbatches", "microbatch", "zero", "recompute", "step_seconds", "seconds", "mfu", "fits", "memory_bytes",
    "reasons",
}  # fmt: skip


def read_plan(spec: str) -> Values:
    """That of "FILE", the first, or of "FILE:3". Raises `InputError` for what has none."""
    name, _, number = spec.rpartition(":")
    if not name or not number.isdigit():
        name, number = spec, "1"
    try:
        plans = json.loads(Path(name).read_text(encoding="utf-8"))["plans"]
        found = plans[int(number) - 1] if int(number) else None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    except IndexError:
        raise InputError(f"{name} has no plan {number}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{name} is no file that `autopar plan --json` wrote: {error}") from None
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        raise InputError(f"plan {number} of {name} is none that `autopar plan --json` wrote")
    return found


def title(plan: Values) -> str:
    mesh = " × ".join(f"{axis}{size}" for axis, size in plan["mesh"].items() if size > 1) or "1 device"
    microbatches = f"{plan['num_microbatches']} microbatches of {plan['microbatch']}"
    return f"{mesh}, {plan['schedule']}, {microbatches}, recompute {plan['recompute']}, zero {plan['zero']}"


def explained(plan: Values) -> str:
    """Where time and memory go."""
    lines = [title(plan), f"  {in_seconds(plan['step_seconds'])} a step, MFU {100 * plan['mfu']:.1f} %"]
    for name, value in sorted(plan["seconds"].items(), key=lambda part: -part[1]):
        lines.append(f"    {name:<16} {in_seconds(value):>9}  {100 * value / plan['step_seconds']:5.1f} %")
    lines.append(f"  memory, {'fits' if plan['fits'] else 'does not fit'}")
    for stage, held in enumerate(plan["memory_bytes"]):
        kinds = ", ".join(f"{kind} {in_bytes(value)}" for kind, value in held.items() if kind != "total" and value)
        lines.append(f"    pp {stage}: {in_bytes(held['total'])}: {kinds}")
    return "\n".join([*lines, *(f"  {reason}" for reason in plan["reasons"])])


def compared(one: Values, other: Values) -> str:
    """Part by part what the second takes more or less."""
    lines = [f"1: {title(one)}", f"2: {title(other)}", f"  {'':<16} {'1':>9} {'2':>9} {'2 − 1':>10}"]
    parts = [(name, one["seconds"].get(name, 0.0), other["seconds"].get(name, 0.0)) for name in {**one["seconds"], **other["seconds"]}]
    for name, first, second in [*parts, ("step", one["step_seconds"], other["step_seconds"])]:
        lines.append(f"  {name:<16} {in_seconds(first):>9} {in_seconds(second):>9} {in_seconds(second - first, sign=True):>10}")
    first, second = (max(held["total"] for held in each["memory_bytes"]) for each in (one, other))
    lines.append(f"  {'memory':<16} {in_bytes(first):>9} {in_bytes(second):>9}")
    return "\n".join(lines)
