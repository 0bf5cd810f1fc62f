"""From measured collectives to the few numbers of a `Link`, by least squares of relative errors.

    seconds = call + steps · α + bytes sent / β

is linear in (call, α, 1/β), none of which may be negative. A protocol for small messages, additions inside the
switch, and factors of single collectives are fitted where they explain more than one α and β can.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np

from autopar.cost.hardware.links import COMMUNICATION_KINDS, CommunicationKind, Link, Protocol, Route, bytes_sent, transfer_seconds

# Two protocols must leave less than this share of one's error, and additions in the switch be so much quicker than the ring.
_WORTH_IT = 0.7
_QUICKER = 0.9
# A collective that takes so much more or less than the ring has a factor of its own.
_NOTABLE = 0.15
_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """One measured collective over `num_ranks` ranks: local input and output in bytes, and the seconds it took."""

    transfer: CommunicationKind
    num_ranks: int
    num_input_bytes: float
    num_output_bytes: float
    seconds: float

    @property
    def sent(self) -> float:
        return bytes_sent(self.transfer, self.num_ranks, self.num_input_bytes, self.num_output_bytes)

    @property
    def steps(self) -> int:
        if self.transfer == "send":
            return 1
        return (self.num_ranks - 1) * (2 if self.transfer == "all_reduce" else 1)

    def error(self, link: Link) -> float:
        """How far `link` is off: 0.1 where it says ten per cent more than was measured."""
        route = Route((self.num_ranks,), 1, self.num_ranks, link, link)
        return transfer_seconds(self.transfer, route, self.num_input_bytes, self.num_output_bytes) / self.seconds - 1


def fit_link(samples: Sequence[Sample], source: str = "", is_nccl: bool = False) -> Link:
    """The link that explains `samples`, of at least two sizes, with the smallest relative errors.

    `is_nccl`: the library chooses between protocols by size, and may add up in the switch. Of others one protocol is fitted, and noise
    is not taken for a second.
    """
    assert samples, "nothing was measured"
    link = _fit_ways(samples, source, is_nccl)
    factors: dict[CommunicationKind, float] = {}
    for _ in range(_ROUNDS):
        factors = _factors(samples, link, reference="all_gather" if is_nccl else "all_reduce")
        even = [replace(sample, seconds=sample.seconds / factors.get(sample.transfer, 1.0)) for sample in samples]
        link = _fit_ways(even, source, is_nccl)
    return replace(link, factors=tuple(factors.items()))


def _factors(samples: Sequence[Sample], link: Link, reference: CommunicationKind) -> dict[CommunicationKind, float]:
    """How many times as long as `link` says each collective takes, compared with `reference`; where that is worth saying."""
    ratios: dict[CommunicationKind, list[float]] = {
        transfer: [1 / (1 + sample.error(link)) for sample in samples if sample.transfer == transfer] for transfer in COMMUNICATION_KINDS
    }
    typical: dict[CommunicationKind, float] = {transfer: median(each) for transfer, each in ratios.items() if each}
    unit = typical.get(reference, 1.0)
    is_fixed = {reference, "all_reduce"} if link.in_switch else {reference}
    return {
        transfer: ratio / unit
        for transfer, ratio in typical.items()
        if len(typical) > 1 and transfer not in is_fixed and abs(ratio / unit - 1) > _NOTABLE
    }


def _fit_ways(samples: Sequence[Sample], source: str, is_nccl: bool) -> Link:
    others = [sample for sample in samples if sample.transfer != "all_reduce"]
    reduces = [sample for sample in samples if sample.transfer == "all_reduce" and sample.num_ranks > 2]
    if is_nccl and others and reduces:
        ring = _fit_protocols(others, source)
        largest = max(reduces, key=lambda sample: sample.sent)
        if _QUICKER * (1 + largest.error(ring)) > 1:
            return replace(ring, in_switch=_fit_switch(reduces, ring))
    return _fit_protocols(samples, source) if is_nccl else _fit_one(samples, source)


def _fit_one(samples: Sequence[Sample], source: str) -> Link:
    link = _solve([], samples, source)
    assert link is not None
    return link


def _fit_protocols(samples: Sequence[Sample], source: str) -> Link:
    """One protocol, or two where they explain much more: messages up to some size are then taken for small ones."""
    one = _fit_one(samples, source)
    sizes = sorted({sample.sent for sample in samples})
    fits = [
        _solve([sample for sample in samples if sample.sent <= size], [sample for sample in samples if sample.sent > size], source)
        for size in sizes[1:-2]
    ]
    two = min((fit for fit in fits if fit is not None), key=lambda link: _misfit(link, samples), default=None)
    return two if two is not None and _misfit(two, samples) < _WORTH_IT * _misfit(one, samples) else one


def _misfit(link: Link, samples: Sequence[Sample]) -> float:
    return mean(abs(sample.error(link)) for sample in samples)


def _solve(small: Sequence[Sample], bulk: Sequence[Sample], source: str) -> Link | None:
    """call, and α and 1/β of each protocol. None where the small one is not the one with less latency and less bandwidth."""
    rows = [(1, sample.steps, sample.sent, 0, 0) for sample in bulk] + [(1, 0, 0, sample.steps, sample.sent) for sample in small]
    seconds = np.array([sample.seconds for sample in (*bulk, *small)])
    matrix = np.array(rows, dtype=float)[:, : 5 if small else 3]
    solution = least_ratios(matrix, seconds, needed=(2, 4) if small else (2,))
    if solution is None:
        largest = max(bulk, key=lambda sample: sample.sent)
        return None if small else Link(0.0, largest.sent / largest.seconds, source)
    call, latency, inverse, *rest = (float(value) for value in solution)
    if not small:
        return Link(latency, 1 / inverse, source, call)
    protocol = Protocol(rest[0], 1 / rest[1])
    if protocol.latency_seconds > latency or protocol.bytes_per_second > 1 / inverse:
        return None
    return Link(latency, 1 / inverse, source, call, protocol)


def least_ratios(matrix: np.ndarray, seconds: np.ndarray, needed: tuple[int, ...]) -> np.ndarray | None:
    """Twice too long counts as much as half as long: errors are divided by the mean of what is measured and what is said."""
    weights, solution = 1 / seconds, None
    for _ in range(_ROUNDS):
        solution = _non_negative(matrix * weights[:, None], seconds * weights, needed)
        if solution is None:
            return None
        weights = 1 / np.sqrt(seconds * np.maximum(matrix @ solution, seconds / 100))
    return solution


def _non_negative(matrix: np.ndarray, target: np.ndarray, needed: tuple[int, ...]) -> np.ndarray | None:
    """Least squares with no negative unknown, by trying every set of unknowns that may be positive; `needed` ones must be."""
    best, best_residual = None, np.inf
    # Columns differ by ten orders of magnitude (steps, bytes).
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    free = [column for column in range(matrix.shape[1]) if column not in needed]
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            columns = sorted((*needed, *chosen))
            values = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)[0] / scale[columns]
            residual = float(np.sum((matrix[:, columns] @ values - target) ** 2))
            is_allowed = all(value > 0 if column in needed else value >= 0 for column, value in zip(columns, values, strict=True))
            if is_allowed and residual < best_residual:
                best, best_residual = np.zeros(matrix.shape[1]), residual
                best[columns] = values
    return best


def _fit_switch(samples: Sequence[Sample], ring: Link) -> Protocol | None:
    """α and β of additions inside the switch: two steps, every rank sends its input once."""
    usable = [sample for sample in samples if sample.error(ring) > 0 and sample.seconds > ring.call_seconds]
    seconds = np.array([sample.seconds for sample in usable])
    matrix = np.array([(2, sample.num_input_bytes) for sample in usable], dtype=float)
    solution = least_ratios(matrix, seconds - ring.call_seconds, needed=(1,)) if usable else None
    return None if solution is None else Protocol(float(solution[0]), 1 / float(solution[1]))
