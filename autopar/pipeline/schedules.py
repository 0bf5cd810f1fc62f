"""Pipeline schedules drawn by hand: pure functions of the numbers of ranks and microbatches.

Every one accepts any number of microbatches. Where a pattern wants more of them, or a multiple of the ranks, it is drawn
for more and the surplus left out: what is left of an order that works still works, because microbatches do not depend on
one another.

    name          backward   chunks   live microbatches   bubble rate (F = I = W, communication free)
    gpipe         B          1        m                   (p−1)/(m+p−1)
    1f1b          B          1        p − rank            (p−1)/(m+p−1)
    interleaved   B          v        up to 2p + (v−1)p − 1 chunks of 1/v   (p−1)/(v·m+p−1), p dividing m
    zb-h1         I, W       1        as 1f1b             (p−1)/(3m+p−1), m ≥ p
    zb-h2         I, W       1        up to 2p − 1        towards 0
    zb-v          I, W       2        2p halves           towards 0

p ranks, m microbatches, v chunks a rank. Sources: GPipe arXiv:1811.06965; 1F1B and interleaving arXiv:2104.04473;
ZB-H1, ZB-H2, ZB-V arXiv:2401.10241.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from autopar.errors import ScheduleError
from autopar.ir.actions import Action, Kind, PipelineSchedule


def gpipe(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards.

    rank 0 | 0F0 0F1 0F2 0F3 .   .   .   0B0 -   0B1 -   0B2 -   0B3 -
    rank 1 | .   1F0 1F1 1F2 1F3 1B0 -   1B1 -   1B2 -   1B3 -
    """
    _check(num_ranks, num_microbatches)
    orders = [_number((rank, kind) for kind in "F" * num_microbatches + "B" * num_microbatches) for rank in range(num_ranks)]
    return _schedule("gpipe", range(num_ranks), num_microbatches, orders)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """As many forwards as it takes for the first gradient to come back, then one forward, one backward in turn.

    rank 0 | 0F0 0F1 .   .   0B0 -   0F2 0B1 -   0F3 0B2 -   .   0B3 -
    rank 1 | .   1F0 1B0 -   1F1 1B1 -   1F2 1B2 -   1F3 1B3 -
    """
    _check(num_ranks, num_microbatches)
    orders: list[list[Action]] = []
    for rank in range(num_ranks):
        warm_up = min(num_ranks - rank - 1, num_microbatches)
        kinds = "F" * warm_up + "FB" * (num_microbatches - warm_up) + "B" * warm_up
        orders.append(_number((rank, kind) for kind in kinds))
    return _schedule("1f1b", range(num_ranks), num_microbatches, orders)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> PipelineSchedule:
    """1F1B over `num_chunks` stages a rank (stage s on rank s mod p): p microbatches through one chunk, then the next.

    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -   0B2 -   0B3 -
    rank 1 | .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -   1B3 -
    """
    _check(num_ranks, num_microbatches)
    if num_chunks < 1:
        raise ScheduleError(f"interleaved wants one or more stages a rank, not {num_chunks}")
    num_stages = num_ranks * num_chunks
    num_drawn = -(-num_microbatches // num_ranks) * num_ranks
    rounds = [range(first, first + num_ranks) for first in range(0, num_drawn, num_ranks)]
    orders: list[list[Action]] = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = [Action(stage, "F", each) for group in rounds for stage in stages for each in group]
        backwards = [Action(stage, "B", each) for group in rounds for stage in reversed(stages) for each in group]
        # One chunk needs no more than 1F1B does: what comes back first comes back to the same chunk.
        distance = num_ranks - rank - 1
        warm_up = min(2 * distance + (num_chunks - 1) * num_ranks if num_chunks > 1 else distance, len(forwards))
        order = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[len(forwards) - warm_up :])
    return _schedule("interleaved", [stage % num_ranks for stage in range(num_stages)], num_microbatches, orders)


def zb_h1(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B with the backward halved: rank r does its weight gradients r microbatches late, in what would be the bubble.

    rank 0 | 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """
    _check(num_ranks, num_microbatches)
    orders = [_number((rank, kind) for kind in _halved(num_ranks - rank, rank, num_microbatches)) for rank in range(num_ranks)]
    return _schedule("zb-h1", range(num_ranks), num_microbatches, orders)


def zb_h2(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Twice the forwards ahead, so that nobody waits for the first gradient, and weight gradients late by 2r: a parallelogram.

    rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    _check(num_ranks, num_microbatches)
    orders = [
        _number((rank, kind) for kind in _halved(2 * (num_ranks - rank) - 1, 2 * rank, num_microbatches)) for rank in range(num_ranks)
    ]
    return _schedule("zb-h2", range(num_ranks), num_microbatches, orders)


def _halved(ahead: int, late: int, num_microbatches: int) -> str:
    """`ahead` forwards, then I, W and F in turn; W starts `late` microbatches after I."""
    ahead, late = min(ahead, num_microbatches), min(late, num_microbatches)
    turns = ("I" + "W" * (done >= late) + "F" * (ahead + done < num_microbatches) for done in range(num_microbatches))
    return "F" * ahead + "".join(turns) + "W" * late


def zb_v(num_ranks: int, num_microbatches: int) -> PipelineSchedule:
    """Two stages a rank, down the ranks and up again (rank r holds stages r and 2p−1−r), so gradients start where forwards end.

    Live halves are the same on all ranks: 2p, as much as 1F1B's rank 0 holds. Drawn for 2p − 1 microbatches or more.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    _check(num_ranks, num_microbatches)
    num_drawn = max(2 * num_ranks - 1, num_microbatches)
    orders: list[list[Action]] = []
    for rank in range(num_ranks):
        pattern = _v_pattern(rank, num_ranks, num_drawn)
        orders.append(_number((rank if way == "down" else 2 * num_ranks - 1 - rank, kind) for way, kind in pattern))
    return _schedule("zb-v", [*range(num_ranks), *reversed(range(num_ranks))], num_microbatches, orders)


def _v_pattern(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, str]]:
    """One rank's kinds, each on its stage on the way down or on the way up."""
    ahead = num_ranks - rank

    def run(way: str, kinds: str) -> Iterator[tuple[str, str]]:
        return ((way, kind) for kind in kinds)

    yield from run("down", "F" * (2 * ahead - 1))
    for _ in range(rank):
        yield from (("up", "F"), ("down", "F"))
    yield from run("up", "FIW" * ahead)
    for number in range(num_microbatches - num_ranks):
        yield from run("down", "F" if number < num_microbatches - num_ranks - ahead + 1 else "")
        yield from run("down", "IW")
        yield from run("up", "FIW")
    for _ in range(rank):
        yield from (("down", "I"), ("up", "I"))
    yield from run("down", "IW" * ahead)
    # What was kept for the end, when nothing comes any more.
    yield from run("up", "W" * rank)
    yield from run("down", "W" * rank)


GENERATORS: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
}


def generate(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> PipelineSchedule:
    """The schedule of that name; `num_chunks` stages a rank where it is interleaved. Its `stages` say where stages must lie.

    Raises `ScheduleError` for a name that is none.
    """
    generator = GENERATORS.get(name)
    if generator is None:
        raise ScheduleError(f"no schedule is called {name!r}: there are auto, {', '.join(GENERATORS)}, or a PipelineSchedule of your own")
    return interleaved(num_ranks, num_microbatches, num_chunks) if name == "interleaved" else generator(num_ranks, num_microbatches)


def _number(stages_and_kinds: Iterable[tuple[int, str]]) -> list[Action]:
    """Each kind of each stage takes the microbatches in turn."""
    counts: Counter[tuple[int, str]] = Counter()
    actions: list[Action] = []
    for stage, kind in stages_and_kinds:
        actions.append(Action(stage, cast(Kind, kind), counts[stage, kind]))
        counts[stage, kind] += 1
    return actions


def _schedule(name: str, stages: Iterable[int], num_microbatches: int, orders: Iterable[Sequence[Action]]) -> PipelineSchedule:
    """The microbatches that were asked for; patterns may have drawn more."""
    kept = (tuple(each for each in order if each.microbatch < num_microbatches) for order in orders)
    return PipelineSchedule(name, tuple(stages), num_microbatches, tuple(kept))


def _check(num_ranks: int, num_microbatches: int) -> None:
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(f"a pipeline wants one or more ranks and microbatches, not {num_ranks} and {num_microbatches}")
