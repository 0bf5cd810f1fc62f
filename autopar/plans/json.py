"""The parts of a plan as JSON values, and back."""

from __future__ import annotations

import json
from typing import Any

from autopar.ir.actions import PipelineSchedule, parse_schedule
from autopar.ir.freedom import Freedom
from autopar.ir.sharding import Dims, Sharding, Strategy


def from_sharding(sharding: Sharding) -> dict[str, Any]:
    found: dict[str, Any] = {"splits": [list(split) for split in sharding.splits]}
    if sharding.unreduced:
        found["unreduced"] = dict(sharding.unreduced)
    return found


def to_sharding(entry: dict[str, Any]) -> Sharding:
    return Sharding(tuple(tuple(split) for split in entry["splits"]), tuple(entry.get("unreduced", {}).items()))


def to_freedom(entry: dict[str, Any]) -> Freedom:
    return Freedom(tuple(entry.get("batch", ("dp",))), tuple(entry.get("free", ())), bool(entry.get("stored", False)))


def to_dims(entry: list[list[int]]) -> Dims:
    return tuple(tuple(dim) for dim in entry)


def from_schedule(schedule: PipelineSchedule | None, cuts: tuple[str, ...]) -> dict[str, Any]:
    if schedule is None:
        return {}
    return {"num_microbatches": schedule.num_microbatches, "text": str(schedule).splitlines(), "cuts": list(cuts)}


def to_schedule(entry: dict[str, Any]) -> PipelineSchedule | None:
    return parse_schedule("\n".join(entry["text"])) if entry else None


def from_strategy(strategy: Strategy) -> dict[str, Any]:
    return {
        "operands": [from_sharding(sharding) for sharding in strategy.operands],
        "results": [from_sharding(sharding) for sharding in strategy.results],
        "factors": dict(strategy.factors),
        "num_shards": strategy.num_shards,
    }


def to_strategy(entry: dict[str, Any]) -> Strategy:
    shardings = [tuple(to_sharding(each) for each in entry[side]) for side in ("operands", "results")]
    return Strategy(shardings[0], shardings[1], tuple(entry.get("factors", {}).items()), entry.get("num_shards", 1))


def indented(content: dict[str, Any]) -> str:
    """JSON with one line for each parameter and each strategy."""
    lines: list[str] = []
    for name, value in content.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in value.items())
            lines.append(f"  {json.dumps(name)}: {{\n{entries}\n  }}")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
