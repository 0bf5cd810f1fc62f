"""Pipeline actions in torch's notation, and a schedule of them: data that prints as a grid and parses back.

`2F0` is the forward of stage 2 on microbatch 0, `2B0` its whole backward, `2I0` and `2W0` the backward's two halves: the
gradients of the stage's inputs, which the stage before waits for, and those of its weights, which nobody waits for.

    pipeline 1f1b: 3 microbatches, stages on ranks 0 1
    rank 0 | 0F0 0F1 .   0B0 -   0F2 0B1 -   .   0B2 -
    rank 1 | .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -

A column is a unit of time (F, I and W take one, B two, communication none); `.` and `-` only keep the picture aligned, and
parsing drops them. Which stage sends to which, and when, is not in the grid: it follows (`autopar/pipeline/expand.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autopar.errors import ScheduleError
from autopar.ir.turns import take_turns

Kind = Literal["F", "B", "I", "W"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)$")
_HEADER = re.compile(r"pipeline (\S+): (\d+) microbatch(?:es)?, stages on ranks ((?:\d+ ?)+)$")
_ROW = re.compile(r"rank +(\d+) *\|(.*)$")
_WIDTH = 128


class Action(NamedTuple):
    """What a rank computes in one go: one stage, one direction, one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """`2F0` → Action(2, "F", 0). Raises `ScheduleError`."""
    match = _ACTION.match(text)
    if match is None:
        raise ScheduleError(f"{text!r} is no action: write stage, one of F B I W, microbatch, as in 2F0")
    return Action(int(match.group(1)), match.group(2), int(match.group(3)))  # type: ignore[arg-type]


class Reduction(NamedTuple):
    """What is done once a step to the gradients of a stage, after its last backward: they are summed over the replicas."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


Direction = Literal["F", "B"]


class Transfer(NamedTuple):
    """One value on its way: F is an activation from the earlier stage to the later, B a gradient on the way back."""

    source: int
    target: int
    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        return f"{self.source}{self.direction}{self.microbatch}>{self.target}"

    @property
    def readers(self) -> tuple[Action, ...]:
        """The actions that may read it; one of them does."""
        kinds: tuple[Kind, ...] = ("F",) if self.direction == "F" else ("B", "I")
        return tuple(Action(self.target, kind, self.microbatch) for kind in kinds)


class Edge(NamedTuple):
    """What stage `source` makes in its forward, stage `target` > `source` reads; its gradient comes back unless it has none."""

    source: int
    target: int
    has_gradient: bool = True


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Each stage feeds the next and no other."""
    return tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1))


def check_edges(edges: Sequence[Edge], num_stages: int) -> None:
    """Raise `ScheduleError` unless every edge goes forward between two stages that are there, and no two the same way."""
    seen: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        if not 0 <= edge.source < edge.target < num_stages:
            raise ScheduleError(f"an edge leads from a stage to a later one, of stages 0 to {num_stages - 1}: not {edge}")
        if edge[:2] in seen:
            raise ScheduleError(
                f"two edges from stage {edge.source} to stage {edge.target}: {seen[edge[:2]]} and {edge}; send all values as one"
            )
        seen[edge[:2]] = edge


class GridCell(NamedTuple):
    """The action at `position` of a rank's order, or one past its end."""

    rank: int
    position: int


@dataclass(frozen=True)
class PipelineSchedule:
    """Which actions each rank runs, in order. `stages[s]` is the rank that holds stage s; `orders[r]` are the actions of rank r.

    Nothing is promised by the type: `autopar.pipeline.check` proves a schedule before it runs.
    """

    name: str
    stages: tuple[int, ...]
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def is_single(self) -> bool:
        """One microbatch through one stage: forward and backward may be apart."""
        return self.num_stages == 1 and self.num_microbatches == 1

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def __str__(self) -> str:
        return self.grid()

    def grid(self, marks: Mapping[GridCell, str] | None = None) -> str:
        """The picture; under each marked action stand carets and, at the end of the line, what is wrong there.

        A mark one past a rank's last action stands for something missing at its end.
        """
        columns = _columns(self)
        lines = [self._header()]
        if columns is None:
            lines.append("(no order of the actions meets all dependencies: columns are not times)")
            columns = tuple(_packed(order) for order in self.orders)
        rows = [_cells(order, starts) for order, starts in zip(self.orders, columns, strict=True)]
        width = max((len(cell) for row in rows for cell in row), default=1) + 1
        per_block = max(_WIDTH // width, 1)
        at = {
            place: columns[place.rank][place.position] if place.position < len(self.orders[place.rank]) else len(rows[place.rank])
            for place in marks or ()
        }
        num_columns = max([1, *(len(row) for row in rows), *(column + 1 for column in at.values())])
        for begin in range(0, num_columns, per_block):
            lines += [""] if begin else []
            for rank, row in enumerate(rows):
                head = f"rank {rank:>{len(str(self.num_ranks - 1))}} | "
                lines.append((head + "".join(cell.ljust(width) for cell in row[begin : begin + per_block])).rstrip())
                found = sorted((column - begin, place) for place, column in at.items() if place.rank == rank)
                here = [(column, (marks or {})[place]) for column, place in found if 0 <= column < per_block]
                lines += _mark_line(len(head), width, here)
        return "\n".join(lines)

    def _header(self) -> str:
        plural = "" if self.num_microbatches == 1 else "es"
        return f"pipeline {self.name}: {self.num_microbatches} microbatch{plural}, stages on ranks {' '.join(map(str, self.stages))}"


# One microbatch through one stage.
SINGLE = PipelineSchedule("1f1b", (0,), 1, ((Action(0, "F", 0), Action(0, "B", 0)),))


def parse_schedule(text: str) -> PipelineSchedule:
    """Read back what a `PipelineSchedule` printed, blocks, marks and all. Raises `ScheduleError` naming the first line that is none."""
    header: re.Match[str] | None = None
    rows: dict[int, list[Action]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith(("(", "|", "^")):
            continue
        if header is None:
            header = _HEADER.match(line)
            if header is None:
                raise ScheduleError(f"line {number} should say `pipeline NAME: N microbatches, stages on ranks 0 1 …`, not {line!r}")
            continue
        row = _ROW.match(line)
        if row is None:
            raise ScheduleError(f"line {number} should be `rank N | actions`, not {line!r}")
        try:
            actions = [parse_action(word) for word in row.group(2).split() if word not in (".", "-")]
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
        rows.setdefault(int(row.group(1)), []).extend(actions)
    if header is None:
        raise ScheduleError("an empty text is no schedule")
    stages = tuple(int(word) for word in header.group(3).split())
    num_ranks = max([*stages, *rows]) + 1
    orders = tuple(tuple(rows.get(rank, ())) for rank in range(num_ranks))
    return PipelineSchedule(header.group(1), stages, int(header.group(2)), orders)


def needs(action: Action, edges: Iterable[Edge], last_kinds: Mapping[tuple[int, int], Kind]) -> list[Action]:
    """The actions whose results `action` reads, its own stage's included.

    `last_kinds[stage, microbatch]` is "B" where that backward is undivided, else "I": it tells which action gives the gradient.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(edge.source, "F", microbatch) for edge in edges if edge.target == stage]
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    givers = [edge.target for edge in edges if edge.source == stage and edge.has_gradient]
    gradients = [Action(giver, last_kinds.get((giver, microbatch), "I"), microbatch) for giver in givers]
    return [Action(stage, "F", microbatch), *gradients]


def backward_kinds(orders: Iterable[Sequence[Action]]) -> dict[tuple[int, int], Kind]:
    """For each (stage, microbatch), the kind of the action that gives its input gradients: "B" or "I"."""
    return {(each.stage, each.microbatch): each.kind for order in orders for each in order if each.kind in ("B", "I")}


def _columns(schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...] | None:
    """The unit of time at which each action starts; None when the orders cannot be met."""
    kinds = backward_kinds(schedule.orders)
    edges_by_stage: dict[int, list[Edge]] = {}
    for edge in chain(schedule.num_stages):
        edges_by_stage.setdefault(edge.source, []).append(edge)
        edges_by_stage.setdefault(edge.target, []).append(edge)
    known = {action for order in schedule.orders for action in order}
    ends: dict[Action, int] = {}
    columns: list[list[int]] = [[] for _ in schedule.orders]
    free = [0] * schedule.num_ranks

    def start(rank: int, action: Action) -> bool:
        wanted = [each for each in needs(action, edges_by_stage.get(action.stage, ()), kinds) if each in known]
        if not all(each in ends for each in wanted):
            return False
        begin = max([free[rank], *(ends[each] for each in wanted)])
        free[rank] = ends[action] = begin + _length(action)
        columns[rank].append(begin)
        return True

    rows = dict(enumerate(schedule.orders))
    return tuple(map(tuple, columns)) if take_turns(rows, start, dict.fromkeys(rows, 0)) else None


def _packed(order: Sequence[Action]) -> tuple[int, ...]:
    """Columns without gaps."""
    lengths = [_length(action) for action in order]
    return tuple(sum(lengths[:index]) for index in range(len(order)))


def _length(action: Action) -> int:
    return 2 if action.kind == "B" else 1


def _cells(order: Sequence[Action], columns: Sequence[int]) -> list[str]:
    cells: list[str] = []
    for action, column in zip(order, columns, strict=True):
        cells += ["."] * (column - len(cells))
        cells += [str(action), "-"][: _length(action)]
    return cells


def _mark_line(margin: int, width: int, here: Sequence[tuple[int, str]]) -> list[str]:
    if not here:
        return []
    line = ""
    for column, _ in here:
        line = line.ljust(margin + column * width) + "^" * (width - 1)
    return [line + "  <-- " + "; ".join(text for _, text in here)]
