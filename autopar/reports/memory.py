"""What a rank will hold in a step, before anything is launched: the curve over the instructions, its peak, and what that is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from autopar.cost.buffer_kinds import Kind, kinds_of
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.rank_memory import MemoryStep, RankMemory
from autopar.cost.rank_sizes import RankSizes, with_update
from autopar.cost.schedule_memory import held_at, schedule_memory
from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.ir.instructions import Copy, Launch, Run, Update
from autopar.ir.instructions import Memory as Location
from autopar.ir.keys import SOURCE, Source
from autopar.ir.pattern import pattern_of
from autopar.ir.schedule import Schedule
from autopar.ir.units import in_bytes
from autopar.reports.memory_picture import picture

KINDS: tuple[Kind, ...] = ("parameters", "optimizer", "gradients", "activations", "temporaries", "in flight", "buckets", "inputs")
# What is held and is no buffer.
_UNNAMED = {"optimizer": "state of the optimizer", "inputs": "the caller's batch, of which a call has copies"}
_SHOWN_ITEMS = 8
_SHOWN_PLACES = 8
_SHOWN_MEASURED = 4


class MemoryItem(NamedTuple):
    """Equal things (`number`) that a rank holds at its peak: what they are, the user's line, and their bytes together."""

    kind: Kind
    what: str
    source: Source
    number: int
    bytes: float


@dataclass(frozen=True)
class PlaceMemory:
    """A rank at one `place` along `pp`. `curve` has a step for each instruction that makes or drops a buffer, `at` is the instruction of
    the peak, and `kinds` and `items` (largest first) what there is then. `parked_bytes` are the most that lies in host memory, or
    in files."""

    place: int
    stages: tuple[int, ...]
    curve: tuple[MemoryStep, ...]
    peak_bytes: float
    at: str
    kinds: Mapping[Kind, float]
    items: tuple[MemoryItem, ...]
    parked_bytes: Mapping[Location, float] = field(default_factory=dict[Location, float])


class MeasuredPeak(NamedTuple):
    """Bytes of a rank in forward and backward: as predicted, as the allocator said, and the instruction at which."""

    predicted_bytes: float
    tracked_bytes: int
    at: str


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank in one step of training, by its place along `pp`, fragments op by op in the order of their graphs.

    `capacity_bytes` is the budget, else what the cluster's device holds; infinite where neither is known. `optimizer` is whose state and
    temporaries are counted. `measured` is by rank, where a batch was given for it: forward and backward alone.
    """

    places: tuple[PlaceMemory, ...]
    capacity_bytes: float = math.inf
    optimizer: str = "adam"
    limit: str = ""
    measured: Mapping[int, MeasuredPeak] = field(default_factory=dict[int, MeasuredPeak])

    @cached_property
    def fullest(self) -> PlaceMemory:
        return max(self.places, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.fullest.peak_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def margin_bytes(self) -> float:
        """What is left of the capacity at the peak; negative where it does not fit."""
        return self.capacity_bytes - self.peak_bytes

    def save(self, path: str | Path) -> None:
        """The curve of every place as an SVG picture. Raises `AutoparError` for another ending."""
        if Path(path).suffix.lower() != ".svg":
            raise AutoparError(f"memory().save({str(path)!r}): pictures are SVG; name a file that ends in .svg: browsers show it")
        Path(path).write_text(picture([(f"pp = {each.place}", each.curve) for each in self.places], KINDS, self.capacity_bytes), "utf-8")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        top = self.fullest
        yield f"memory of a rank in a step: at most {in_bytes(top.peak_bytes)}{self._where(top)}, during {_short(top.at)}"
        if math.isinf(self.capacity_bytes):
            yield "  what a device holds is not known: pass memory_budget= or cluster="
        elif self.fits:
            yield f"  fits into {self.limit}, {in_bytes(self.margin_bytes)} to spare"
        else:
            yield f"  does NOT fit into {self.limit}: {in_bytes(-self.margin_bytes)} too much"
        shown: list[Kind] = [kind for kind in KINDS if any(each.kinds.get(kind) for each in self.places)]
        yield "  at the peak  " + "".join(f"{kind:>13}" for kind in shown) + f"{'together':>13}"
        for each in sorted(self.places, key=lambda each: -each.peak_bytes)[:_SHOWN_PLACES]:
            row = "".join(f"{in_bytes(each.kinds.get(kind, 0)):>13}" for kind in shown)
            yield f"  {f'pp = {each.place}':<13}{row}{in_bytes(each.peak_bytes):>13}"
        if len(self.places) > _SHOWN_PLACES:
            yield f"  … and {len(self.places) - _SHOWN_PLACES} places that hold less"
        parked: dict[Location, float] = {}
        for memory, size in (item for each in self.places for item in each.parked_bytes.items()):
            parked[memory] = max(size, parked.get(memory, 0))
        for memory, most in parked.items():
            yield f"  besides, away from the device: at most {in_bytes(most)} in {'host memory' if memory == 'host' else 'files'}"
        yield f"  the largest{self._where(top)} (state of the optimizer: {self.optimizer})"
        for item in top.items[:_SHOWN_ITEMS]:
            number = f" × {item.number}" if item.number > 1 else ""
            line = f"   {item.source.file.rsplit('/', 1)[-1]}:{item.source.line}" if item.source.file else ""
            yield f"  {in_bytes(item.bytes):>10}  {item.kind:<12} {item.what}{number}{line}"
        for rank, (predicted, tracked, at) in sorted(self.measured.items(), key=lambda each: -each[1].tracked_bytes)[:_SHOWN_MEASURED]:
            apart = f"{predicted / tracked - 1:+.1%}" if tracked else "nothing"
            yield f"  measured on rank {rank}: {in_bytes(tracked)} in forward and backward, predicted {apart}, during {_short(at)}"

    def _where(self, place: PlaceMemory) -> str:
        return f" at pp = {place.place}" if len(self.places) > 1 else ""


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def capacity_of(compiled: Compiled) -> tuple[float, str]:
    """The budget, else what the smallest device holds, in bytes and in words; infinite where neither is known."""
    budget = compiled.budget.capacity_bytes
    if math.isfinite(budget):
        return budget, f"memory_budget={in_bytes(budget)}"
    if compiled.cost is None or compiled.cost.cluster.device.name == Cluster.ideal().device.name:
        return math.inf, ""
    device = compiled.cost.cluster.device
    return device.memory_bytes, f"the {in_bytes(device.memory_bytes)} of a {device.name}"


def memory_of(compiled: Compiled, sizes: RankSizes, capacity_bytes: float, limit: str) -> Memory:
    """Of the step with its updates where there is one, else of a plain one and an update behind it."""
    program = compiled.updating or compiled.schedule
    sources = {node.name: SOURCE.get(node) or Source() for node in compiled.local.graph.nodes}
    places: list[PlaceMemory] = []
    for number, schedule in enumerate(program.places):
        schedule = with_update(schedule)
        found = schedule_memory(schedule, sizes.of(schedule))
        places.append(_place(number, tuple(program.stages_of(number)), schedule, found, sizes, sources))
    return Memory(tuple(places), capacity_bytes, sizes.budget.optimizer.name, limit)


def _place(
    place: int, stages: tuple[int, ...], schedule: Schedule, found: RankMemory, sizes: RankSizes, sources: Mapping[str, Source]
) -> PlaceMemory:
    if not found.steps:
        return PlaceMemory(place, stages, (), found.held_bytes, "nothing", {}, ())
    peak = max(found.steps, key=lambda step: step.during_bytes)
    at = schedule.instructions[peak.position]
    fragment = sizes.fragment(schedule, at) if isinstance(at, Run) else None
    if isinstance(at, Run) and fragment is not None:
        # At the peak inside a fragment some results are not there yet.
        items = [*_held(schedule, sizes, peak.position - 1, sources)]
        kinds: dict[str, Kind] = {schedule.buffers[name].value: kinds_of(schedule)[name] for name in at.outputs}
        for each in fragment.values:
            items.append(MemoryItem(kinds.get(each.name, "temporaries"), _op(each.op, each.source), each.source, 1, each.bytes))
    else:
        items = [*_held(schedule, sizes, peak.position, sources)]
        items.append(MemoryItem("temporaries", "within the update", Source(), 1, peak.kinds.get("temporaries", 0.0)))
    return PlaceMemory(
        place, stages, found.steps, peak.during_bytes, _told(at), dict(peak.kinds), _together(items), dict(found.parked_bytes)
    )


def _told(instruction: object) -> str:
    if isinstance(instruction, Run):
        return f"RUN {instruction.fragment}"
    if isinstance(instruction, Update):
        return "UPDATE"
    if isinstance(instruction, Copy):
        return f"COPY {instruction.memory}"
    return f"LAUNCH {instruction.collective}" if isinstance(instruction, Launch) else str(instruction)


def _held(schedule: Schedule, sizes: RankSizes, position: int, sources: Mapping[str, Source]) -> Iterator[MemoryItem]:
    inputs = {name: item for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True)}
    for held in held_at(schedule, sizes.of(schedule), position):
        first = next(iter(held.names), "")
        item = inputs.get(first)
        if item is not None:
            what = pattern_of(item.name) if item.kind != "batch" else f"batch input {item.name}"
            yield MemoryItem(held.kind, what, Source(), 1, held.bytes)
        elif first in schedule.buffers:
            value = schedule.buffers[first].value
            source = sources.get(value, Source())
            yield MemoryItem(held.kind, _op(value.rstrip("_0123456789"), source), source, 1, held.bytes)
        elif held.bytes:
            yield MemoryItem(held.kind, _UNNAMED.get(held.kind, first), Source(), 1, held.bytes)


def _op(op: str, source: Source) -> str:
    return f"{op} in {pattern_of(source.module)}" if source.module else op


def _together(items: Sequence[MemoryItem]) -> tuple[MemoryItem, ...]:
    """Equal ones of repeated layers as one, largest first."""
    found: dict[tuple[Kind, str, str, int], MemoryItem] = {}
    for item in items:
        key = item.kind, item.what, item.source.file, item.source.line
        known = found.get(key)
        found[key] = item if known is None else known._replace(number=known.number + 1, bytes=known.bytes + item.bytes)
    return tuple(sorted(found.values(), key=lambda item: -item.bytes))
