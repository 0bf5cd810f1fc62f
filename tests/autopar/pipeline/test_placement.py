"""The placement found is the best of all, by trying all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from autopar.errors import MemoryBudgetError, PlanError
from autopar.pipeline import placement_search
from autopar.pipeline.placement import Devices, Line, Shared, Unit, Value, place, place_training, placed_at

INFINITY = math.inf


def chain_of(seconds: Sequence[float], send_bytes: float = 0.0) -> Line:
    """Units that each feed the next; half of their seconds is forward."""
    units = tuple(Unit(f"u{number}", each / 2, each / 2) for number, each in enumerate(seconds))
    return Line(units, tuple(Value(number, (number + 1,), send_bytes) for number in range(len(units) - 1)))


def spelled_out(line: Line, devices: Devices, live: Sequence[int], starts: Sequence[int]) -> list[tuple[float, float, float]]:
    """Seconds, communication and bytes of every stage, as the words say it and nothing else."""
    ends = [*starts[1:], len(line.units)]
    found: list[tuple[float, float, float]] = []
    for stage, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        inside, units = range(begin, end), line.units[begin:end]
        received = [v for v in line.values if v.producer < begin and any(reader in inside for reader in v.readers)]
        sent = [v for v in line.values if v.producer in inside and any(reader >= end for reader in v.readers)]
        trips = [trip for value in received + sent for trip in [value.bytes] * (2 if value.has_gradient else 1)]
        communication = sum(devices.latency_seconds + devices.seconds_per_byte * each for each in trips)
        compute = sum(unit.forward_seconds + unit.backward_seconds for unit in units) / devices.speeds[stage]
        held = sum(unit.held_bytes for unit in units) + sum(s.bytes for s in line.shared if any(unit in inside for unit in s.units))
        saved = sum(unit.saved_bytes for unit in units) + sum(value.bytes for value in received)
        found.append((compute + communication, communication, held + live[stage] * saved + max(unit.working_bytes for unit in units)))
    return found


def all_starts(num_units: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *rest) for rest in itertools.combinations(range(1, num_units), num_stages - 1))


def by_trying_all(line: Line, devices: Devices, live: Sequence[int]) -> tuple[float, float, float] | None:
    """Slowest stage, total communication and sum of squares of the best placement; None where none fits."""
    scores: list[tuple[float, float, float]] = []
    for starts in all_starts(len(line.units), devices.num_stages):
        stages = spelled_out(line, devices, live, starts)
        if all(held <= capacity for (_, _, held), capacity in zip(stages, devices.capacity_bytes, strict=True)):
            scores.append((max(s for s, _, _ in stages), sum(c for _, c, _ in stages), sum(s * s for s, _, _ in stages)))
    return min(scores, default=None)


def random_line(draw: random.Random, num_units: int) -> Line:
    """Whole numbers: everything is exact, and ties are many."""
    units = tuple(
        Unit(f"u{n}", draw.randint(0, 3), draw.randint(0, 6), draw.randint(0, 5), draw.randint(0, 3), draw.choice([0, 0, 4]))
        for n in range(num_units)
    )
    values = [Value(n, (n + 1,), draw.randint(0, 4), draw.random() < 0.8) for n in range(num_units - 1) if draw.random() < 0.9]
    for _ in range(draw.randint(0, 4)):
        producer = draw.randrange(num_units - 1)
        later = range(producer + 1, num_units)
        readers = tuple(draw.sample(later, min(len(later), draw.randint(1, 3))))
        values.append(Value(producer, readers, draw.randint(0, 4), draw.random() < 0.7))
    shared = [Shared(tuple(draw.sample(range(num_units), 2)), draw.randint(1, 8)) for _ in range(draw.randint(0, 2))]
    return Line(units, tuple(values), tuple(shared))


def random_devices(draw: random.Random, num_stages: int) -> Devices:
    speeds = tuple(draw.choice([0.5, 1.0, 2.0]) for _ in range(num_stages)) if draw.random() < 0.5 else (1.0,) * num_stages
    capacity = tuple(draw.choice([INFINITY, draw.randint(15, 50)]) for _ in range(num_stages))
    return Devices(speeds, capacity if draw.random() < 0.6 else (INFINITY,) * num_stages, draw.choice([0, 0.5, 2]), draw.choice([0, 1]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("as_if_long", [False, True])
def test_it_is_the_best_of_all(seed: int, as_if_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`as_if_long`: with a few cuts first, windows from them, and tables in pieces, as long lines are."""
    if as_if_long:
        for name, size in (("_FEW", 1), ("_ENTRIES", 8), ("_MIN_ROWS", 2)):
            monkeypatch.setattr(placement_search, name, size)
    draw = random.Random(seed)
    refused = 0
    for _ in range(60):
        num_stages = draw.randint(1, 4)
        line, devices = random_line(draw, draw.randint(max(num_stages, 2), 11)), random_devices(draw, num_stages)
        live = [draw.randint(1, num_stages) for _ in range(num_stages)]
        best = by_trying_all(line, devices, live)
        if best is None:
            refused += 1
            with pytest.raises(MemoryBudgetError):
                place(line, devices, live)
            continue
        found = place(line, devices, live)
        spelled = spelled_out(line, devices, live, found.starts)
        assert found.seconds == pytest.approx([seconds for seconds, _, _ in spelled])
        assert found.bytes == pytest.approx([held for _, _, held in spelled])
        assert all(held <= capacity for held, capacity in zip(found.bytes, devices.capacity_bytes, strict=True))
        score = (found.slowest_seconds, sum(s.communication_seconds for s in found.stages), sum(s * s for s in found.seconds))
        assert score == pytest.approx(best)
    assert 0 < refused < 40


@pytest.mark.parametrize("seed", range(3))
def test_a_long_line_is_cut_as_well_as_a_short_one(seed: int) -> None:
    """Long enough that a few cuts are tried first; two stages, so that trying all is quick."""
    draw = random.Random(seed)
    line, devices = random_line(draw, 700), Devices((1.0, 0.5), (INFINITY, 1900.0), 2.0, 1.0)
    best = by_trying_all(line, devices, [2, 1])
    found = place(line, devices, [2, 1])
    assert best is not None
    assert found.slowest_seconds == best[0]
    assert sum(stage.communication_seconds for stage in found.stages) == best[1]


def test_sixteen_stages_of_a_long_line_are_within_a_unit_of_even() -> None:
    draw = random.Random(0)
    seconds = [draw.randint(1, 9) for _ in range(3000)]
    found = place(chain_of(seconds), Devices.equal(16), [1] * 16)
    assert max(seconds) + sum(seconds) / 16 > found.slowest_seconds >= sum(seconds) / 16


def test_a_slow_device_gets_less() -> None:
    found = place(chain_of([1.0] * 12), Devices((1.0, 0.5), (INFINITY,) * 2), [1, 1])
    assert found.starts == (0, 8)
    assert found.seconds == (8.0, 8.0)


def test_a_skip_goes_straight_to_where_it_is_read() -> None:
    """The stage in the middle neither pays for it nor holds it."""
    line = chain_of([1.0] * 3, send_bytes=1.0)
    line = Line(line.units, (*line.values, Value(0, (2,), 10.0)))
    found = place(line, Devices.equal(3, seconds_per_byte=1.0), [3, 2, 1])
    assert [stage.communication_seconds for stage in found.stages] == [2 + 20, 2 + 2, 2 + 20]
    assert [stage.received_bytes for stage in found.stages] == [0.0, 1.0, 11.0]


def test_what_all_decoder_units_read_is_received_once_by_each_stage() -> None:
    line = chain_of([1.0] * 5)
    line = Line(line.units, (Value(0, (1, 2, 3, 4), 5.0, has_gradient=False),))
    found = placed_at(line, Devices.equal(3, seconds_per_byte=1.0), [1, 1, 1], (0, 1, 3))
    assert [stage.communication_seconds for stage in found.stages] == [5.0, 5.0, 5.0]
    assert [stage.received_bytes for stage in found.stages] == [0.0, 5.0, 5.0]


def test_a_cut_moves_to_where_there_is_less_to_send() -> None:
    line = chain_of([2.0] * 8)
    values = tuple(value._replace(bytes=0.25 if value.producer == 4 else 4.0) for value in line.values)
    found = place(Line(line.units, values), Devices.equal(2, seconds_per_byte=1.0), [2, 1])
    assert found.starts == (0, 5)


def test_of_equal_ones_the_most_even() -> None:
    """The first unit is slowest whatever follows."""
    found = place(chain_of([9.0, 1, 1, 1, 1, 1, 1]), Devices.equal(3), [1, 1, 1])
    assert found.starts == (0, 1, 4)


def test_tied_embeddings_are_held_by_both_ends() -> None:
    line = Line(chain_of([1.0] * 4).units, (), (Shared((0, 3), 100.0),))
    found = place(line, Devices.equal(4), [4, 3, 2, 1])
    assert [stage.held_bytes for stage in found.stages] == [100.0, 0.0, 0.0, 100.0]


def test_early_stages_take_fewer_units_where_live_microbatches_fill_them() -> None:
    units = tuple(Unit(f"u{number}", 1.0, 2.0, saved_bytes=1.0) for number in range(12))
    assert place(Line(units), Devices.equal(3), [3, 2, 1]).starts == (0, 4, 8)
    assert place(Line(units), Devices.equal(3, capacity_bytes=8.0), [3, 2, 1]).starts == (0, 2, 6)


def test_what_does_not_fit_is_said() -> None:
    units = tuple(Unit(f"layers.{number}", 1.0, 2.0, held_bytes=2.0**30, saved_bytes=2.0**29) for number in range(6))
    with pytest.raises(MemoryBudgetError) as caught:
        place(Line(units), Devices.equal(2, capacity_bytes=2.0**32), [2, 1])
    text = str(caught.value)
    # Three units each: 3 + 2 × 1.5 GiB on the first stage; two there and four on the second: 6 on the second.
    assert "stage 1 (from 'layers.2') needs 6 GiB and may have 4, 2 GiB too much" in text or (
        "stage 0 (from 'layers.0') needs 6 GiB and may have 4, 2 GiB too much" in text
    )
    assert "more stages" in text and "memory_budget" in text


def test_fewer_units_than_stages_are_refused() -> None:
    with pytest.raises(PlanError, match="4 pipeline stages, but only 3 units of work .* use 3 stages or fewer"):
        place(chain_of([1.0] * 3), Devices.equal(4), [1] * 4)


def test_each_stage_trains_something_where_that_can_be() -> None:
    """An optimizer refuses to be made of no parameters."""
    line, two = chain_of([1.0] * 6), Devices.equal(2)
    assert place(line, two, [2, 1]).starts == (0, 3)
    for training, starts in (({1, 2}, (0, 2)), ({0, 1, 2, 5}, (0, 2)), ({2, 3}, (0, 3))):
        found = place_training(line, two, [2, 1], training)
        assert found is not None and found.starts == starts
    assert place_training(line, two, [2, 1], {4}) is None, "fewer than stages"


def test_it_prints_as_a_table() -> None:
    units = tuple(Unit(f"layers.{number}", 0.001, 0.002, 2.0**30, 2.0**28) for number in range(4))
    line = Line(units, tuple(Value(number, (number + 1,), 2.0**20) for number in range(3)))
    lines = str(place(line, Devices.equal(2, seconds_per_byte=1e-9), [2, 1])).splitlines()
    assert lines[0].split() == "stage first unit units ms compute + send GiB held + live × saved + working".split()
    assert lines[1].split() == "0 layers.0 2 8.097 * 74.1% + 25.9% 3 2 + 2 × 0.5 + 0".split()
    assert lines[2].split()[:3] == ["1", "layers.2", "2"]
    assert place(line, Devices.equal(2), [2, 1]).stage_of == (0, 0, 1, 1)
