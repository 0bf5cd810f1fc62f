"""The memory of ranks over a step as an SVG picture: a chart for each place along `pp`, kinds of bytes one upon another.

Written by hand: a plotting library would be the largest dependency of ours, for one chart. Other formats are a browser's print or
`rsvg-convert` away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from autopar.cost.buffer_kinds import Kind
from autopar.cost.rank_memory import MemoryStep
from autopar.ir.units import in_bytes

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_COLOURS: dict[Kind, str] = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#F0E442",
    "in flight": "#D55E00",
    "buckets": "#CC79A7",
    "inputs": "#999999",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 900, 260, 90, 40, 60
_TICKS = 4

Curve = tuple[str, Sequence[MemoryStep]]


def picture(curves: Sequence[Curve], kinds: Sequence[Kind], capacity_bytes: float = math.inf) -> str:
    """The text of an SVG file. All charts have one scale; a dashed line is the capacity, where one is known."""
    most = max((step.during_bytes for _, curve in curves for step in curve), default=1.0)
    top = max(most, capacity_bytes) if capacity_bytes <= 2 * most else most
    height = _TOP + len(curves) * (_HEIGHT + _GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_LEFT + _WIDTH + 20}" height="{height}" fill="white"/>',
        *_legend([kind for kind in kinds if any(step.kinds.get(kind) for _, curve in curves for step in curve)]),
    ]
    for number, (title, curve) in enumerate(curves):
        lines += _chart(title, curve, kinds, top or 1.0, capacity_bytes, _TOP + number * (_HEIGHT + _GAP))
    return "\n".join([*lines, "</svg>", ""])


def _legend(kinds: Sequence[Kind]) -> Iterator[str]:
    for number, kind in enumerate(kinds):
        x = _LEFT + 110 * number
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{_COLOURS[kind]}"/><text x="{x + 16}" y="20">{kind}</text>'


def _chart(title: str, curve: Sequence[MemoryStep], kinds: Sequence[Kind], top: float, capacity: float, begin: int) -> Iterator[str]:
    """Bytes upwards from nothing to `top`, instructions from left to right; each step is as wide as the instructions until the next."""
    last = max((step.position for step in curve), default=0) + 1
    base = begin + _HEIGHT

    def x(position: float) -> float:
        return round(_LEFT + _WIDTH * position / last, 2)

    def y(size: float) -> float:
        return round(base - _HEIGHT * size / top, 2)

    yield f'<text x="{_LEFT}" y="{begin - 4}" font-weight="bold">{escape(title)}</text>'
    for tick in range(_TICKS + 1):
        size = top * tick / _TICKS
        yield f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(size)}" y2="{y(size)}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(size) + 4}" text-anchor="end">{in_bytes(size)}</text>'
    edges = [(step.position, step.kinds) for step in curve]
    ends = [*(position for position, _ in edges[1:]), last]
    below = [0.0] * len(edges)
    for kind in kinds:
        above = [low + held.get(kind, 0.0) for low, (_, held) in zip(below, edges, strict=True)]
        if above != below:
            upper = [(x(at), y(size)) for (start, _), end, size in zip(edges, ends, above, strict=True) for at in (start, end)]
            lower = [(x(at), y(size)) for (start, _), end, size in zip(edges, ends, below, strict=True) for at in (start, end)]
            points = " ".join(f"{one},{other}" for one, other in [*upper, *reversed(lower)])
            yield f'<polygon points="{points}" fill="{_COLOURS[kind]}"><title>{kind}</title></polygon>'
        below = above
    if capacity <= top:
        yield f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(capacity)}" y2="{y(capacity)}" stroke="black" stroke-dasharray="6 4"/>'
        yield f'<text x="{_LEFT + _WIDTH}" y="{y(capacity) - 4}" text-anchor="end">capacity {in_bytes(capacity)}</text>'
    yield f'<text x="{_LEFT + _WIDTH}" y="{base + 18}" text-anchor="end">instructions 0 to {last - 1}</text>'
