"""Timelines as Chrome trace JSON: open in chrome://tracing or ui.perfetto.dev.

One process per rank, one thread per stream, a counter for memory. A measured timeline is the same events from a clock: pass
both to `trace` under names of their own and they stand below each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.pipeline.simulate import Event, Simulation

_MICROSECONDS = 1e6


def trace(timelines: Mapping[str, Sequence[Event] | Simulation]) -> dict[str, Any]:
    """`{"predicted": simulation, "measured": events}` as one trace. Ranks stand in order, a rank's timelines next to each other."""
    items: list[dict[str, Any]] = []
    for number, (label, timeline) in enumerate(timelines.items()):
        events = timeline.events if isinstance(timeline, Simulation) else timeline
        process = {rank: rank * len(timelines) + number for rank in sorted({event.rank for event in events})}
        thread = {(rank, stream): index for rank in process for index, stream in enumerate(_streams(events, rank))}
        items += _names(label, process, thread)
        items += (_slice(event, process[event.rank], thread[event.rank, event.stream]) for event in events)
        if isinstance(timeline, Simulation):
            items += _memory(timeline, process)
    return {"traceEvents": items, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, timelines: Mapping[str, Sequence[Event] | Simulation]) -> None:
    """`trace` into a file."""
    Path(path).write_text(json.dumps(trace(timelines)), encoding="utf-8")


def _streams(events: Iterable[Event], rank: int) -> list[str]:
    """Compute first."""
    return sorted({event.stream for event in events if event.rank == rank}, key=lambda stream: (stream != "compute", stream))


def _names(label: str, process: Mapping[int, int], thread: Mapping[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    for rank, identity in process.items():
        yield {"ph": "M", "name": "process_name", "pid": identity, "args": {"name": f"rank {rank} {label}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": identity, "args": {"sort_index": identity}}
    for (rank, stream), number in thread.items():
        yield {"ph": "M", "name": "thread_name", "pid": process[rank], "tid": number, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process[rank], "tid": number, "args": {"sort_index": number}}


def _slice(event: Event, process: int, thread: int) -> dict[str, Any]:
    start, end = (seconds * _MICROSECONDS for seconds in (event.start_seconds, event.end_seconds))
    return {"ph": "X", "name": event.name, "cat": event.stream, "pid": process, "tid": thread, "ts": start, "dur": end - start}


def _memory(simulation: Simulation, process: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    for rank, identity in process.items():
        ends = simulation.instruction_seconds[rank]
        for step in simulation.memory[rank].steps:
            begin = ends[step.position - 1] if step.position else 0.0
            for seconds, num_bytes in ((begin, step.during_bytes), (ends[step.position], step.after_bytes)):
                yield {"ph": "C", "name": "bytes", "pid": identity, "ts": seconds * _MICROSECONDS, "args": {"bytes": num_bytes}}
