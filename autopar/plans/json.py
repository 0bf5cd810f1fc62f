"""The parts of a plan as JSON values, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypeAlias, TypedDict

from autopar.ir.actions import PipelineSchedule, parse_schedule
from autopar.ir.freedom import Freedom
from autopar.ir.sharding import Dims, ReductionKind, Sharding, Strategy
from autopar.ir.zero import ZeRO

# What json.dumps takes; lists may be tuples.
Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"


class ShardingEntry(TypedDict):
    splits: list[list[str]]
    unreduced: NotRequired[dict[str, ReductionKind]]


class PlacementEntry(ShardingEntry):
    dims: list[list[int]]
    unpadded: NotRequired[list[list[int]]]


class StrategyEntry(TypedDict):
    operands: list[ShardingEntry]
    results: list[ShardingEntry]
    factors: NotRequired[dict[str, str]]
    num_shards: NotRequired[int]


class FreedomEntry(TypedDict, total=False):
    """`free` and `stored` are what earlier plans call `flexible` and `shards_parameters`."""

    batch: list[str]
    flexible: list[str]
    shards_parameters: bool
    free: list[str]
    stored: bool
    zero: dict[str, int] | None


class ScheduleEntry(TypedDict):
    num_microbatches: int
    text: list[str]
    cuts: NotRequired[list[str]]


class PlanEntry(TypedDict):
    """What stands in the file of a plan; parts that earlier releases did not write need not be there."""

    version: int
    mesh: dict[str, int]
    parameters: dict[str, PlacementEntry]
    freedom: NotRequired[FreedomEntry]
    pinned: NotRequired[list[str]]
    buckets: NotRequired[dict[str, int]]
    chunks: NotRequired[dict[str, int] | None]
    fingerprint: NotRequired[str]
    inputs: NotRequired[dict[str, PlacementEntry]]
    strategies: NotRequired[dict[str, StrategyEntry]]
    precision: NotRequired[dict[str, str | list[str]] | None]
    kernels: NotRequired[dict[str, str]]
    schedule: NotRequired[ScheduleEntry | None]
    reasons: NotRequired[dict[str, str]]


def from_sharding(sharding: Sharding) -> dict[str, Json]:
    found: dict[str, Json] = {"splits": [list(split) for split in sharding.splits]}
    if sharding.unreduced:
        found["unreduced"] = dict(sharding.unreduced)
    return found


def to_sharding(entry: ShardingEntry) -> Sharding:
    return Sharding(tuple(tuple(split) for split in entry["splits"]), tuple(entry.get("unreduced", {}).items()))


def to_freedom(entry: FreedomEntry) -> Freedom:
    flexible = tuple(entry.get("flexible", entry.get("free", ())))
    shards_parameters = bool(entry.get("shards_parameters", entry.get("stored", False)))
    return Freedom(tuple(entry.get("batch", ("dp",))), flexible, shards_parameters, ZeRO.of_content(entry.get("zero")))


def from_freedom(freedom: Freedom) -> dict[str, Json]:
    zero = {"zero": freedom.zero.content()} if freedom.zero is not None else {}
    return {"batch": freedom.batch, "flexible": freedom.flexible, "shards_parameters": freedom.shards_parameters, **zero}


def to_dims(entry: list[list[int]]) -> Dims:
    return tuple(tuple(dim) for dim in entry)


def from_schedule(schedule: PipelineSchedule | None, cuts: tuple[str, ...]) -> dict[str, Json]:
    if schedule is None:
        return {}
    return {"num_microbatches": schedule.num_microbatches, "text": str(schedule).splitlines(), "cuts": list(cuts)}


def to_schedule(entry: ScheduleEntry | None) -> PipelineSchedule | None:
    return parse_schedule("\n".join(entry["text"])) if entry else None


def from_strategy(strategy: Strategy) -> dict[str, Json]:
    return {
        "operands": [from_sharding(sharding) for sharding in strategy.operands],
        "results": [from_sharding(sharding) for sharding in strategy.results],
        "factors": dict(strategy.factors),
        "num_shards": strategy.num_shards,
    }


def to_strategy(entry: StrategyEntry) -> Strategy:
    operands, results = (tuple(map(to_sharding, entries)) for entries in (entry["operands"], entry["results"]))
    return Strategy(operands, results, tuple(entry.get("factors", {}).items()), entry.get("num_shards", 1))


def indented(content: Mapping[str, Json]) -> str:
    """JSON with one line for each parameter and each strategy."""
    lines: list[str] = []
    for name, value in content.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in value.items())
            lines.append(f"  {json.dumps(name)}: {{\n{entries}\n  }}")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
