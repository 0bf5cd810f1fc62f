"""A budget is for the whole step: the search is asked for less until what it finds fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.driver.options import Options
from autopar.errors import MemoryBudgetError
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import virtual_mesh
from autopar.ir.offload import Offload
from autopar.pipeline.stays import Trips
from autopar.reports.memory import Memory, PlaceMemory
from autopar.reports.within_budget import within_budget
from tests.support.models.zoo import gpt2


def compiled_with(budget: float, takes: dict[float, float], counted: float = math.inf, is_unbound: bool = False) -> tuple[Any, list[float]]:
    """What a search gives that takes so much (by the first of `takes` that it may), and with what it was asked. It counts `counted`."""
    asked: list[float] = []

    class Found:
        def __init__(self, options: Options) -> None:
            asked.append(options.budget.capacity_bytes)
            self.peak = next((peak for least, peak in takes.items() if asked[-1] >= least), None)
            self.counted_bytes = counted
            if self.peak is None:
                raise MemoryBudgetError("the search says what conflicts")

        def within(self, _: MemoryBudget) -> Any:
            return self

    def memory(found: Any) -> Memory:
        place = PlaceMemory(0, (0,), (), found.peak, "RUN f7", {"parameters": 40.0, "optimizer": 20.0, "activations": found.peak - 60}, ())
        return Memory((place,), budget, limit=f"memory_budget={budget:.0f} B")

    options = Options(Cluster.ideal(), budget=MemoryBudget(budget))
    by_name = options.by_name(virtual_mesh(dp=2), is_placed=False) if is_unbound else ()
    return within_budget(options, Found, memory, by_name), asked  # type: ignore[arg-type]


def test_what_fits_is_taken_at_once() -> None:
    found, asked = compiled_with(100, {0: 90})
    assert found.peak == 90 and asked == [100]


def test_the_search_is_asked_for_less_by_what_was_too_much() -> None:
    found, asked = compiled_with(100, {95: 110, 0: 99})
    assert found.peak == 99 and asked == [100, 90]


def test_what_was_counted_must_become_less() -> None:
    """A plan that counts 80 where 100 are left is found again until there are fewer than 80."""
    found, asked = compiled_with(100, {80: 110, 0: 99}, counted=80)
    assert found.peak == 99 and asked == [100, 70]


def test_between_too_much_and_nothing_there_may_be_a_plan() -> None:
    found, asked = compiled_with(100, {90: 130, 60: 99})
    assert found.peak == 99 and asked == [100, 70]
    found, asked = compiled_with(100, {90: 150, 60: 99})
    assert found.peak == 99 and asked == [100, 50, 75]


def test_a_budget_that_does_not_bind_changes_nothing() -> None:
    """What is found without a budget is taken where it fits: no search is asked to keep within one."""
    found, asked = compiled_with(100, {math.inf: 90, 0: 80}, is_unbound=True)
    assert found.peak == 90 and asked == [math.inf]
    found, asked = compiled_with(100, {math.inf: 110, 0: 80}, is_unbound=True)
    assert found.peak == 80 and asked == [math.inf, 100]


def test_what_no_search_finds_may_be_asked_for_by_name() -> None:
    """Levels of ZeRO from the highest, of each first what is computed again so that it fits, as long as what is held leaves room."""
    options, asked = Options(Cluster.ideal(), budget=MemoryBudget(100)), list[tuple[int, str]]()

    def compile_by(options: Options) -> Any:
        if options.budget.is_finite:
            raise MemoryBudgetError("the search says what conflicts")
        asked.append((options.freedom.zero.level if options.freedom.zero is not None else 0, options.recompute))
        level, mode = asked[-1]
        found = SimpleNamespace(level=level, mode=mode, recomputes_within=False, within=lambda budget: found)
        return found

    def memory(takes: dict[int, tuple[float, float]]) -> Callable[[Any], Memory]:
        """By level what is held, and what is taken."""

        def counted(found: Any) -> Memory:
            held, more = takes[found.level]
            place = PlaceMemory(0, (0,), (), held + more, "RUN f7", {"parameters": held, "activations": more}, ())
            return Memory((place,), 100, limit="memory_budget=100 B")

        return counted

    by_name = replace(options, freedom=Freedom(shards_parameters=True)).by_name(virtual_mesh(dp=2), is_placed=False)
    found = within_budget(options, compile_by, memory({3: (40, 70), 2: (50, 40), 0: (90, 90)}), by_name)
    assert (found.level, found.mode) == (2, "auto")  # type: ignore[attr-defined]
    assert asked == [(0, "auto"), (3, "auto"), (3, "full"), (2, "auto")]
    asked.clear()
    with pytest.raises(
        MemoryBudgetError,
        match="the search says what conflicts\ncounted call by call, the least that was found takes 170 B: memory_budget='170 B'",
    ):
        within_budget(options, compile_by, memory({3: (140, 30), 0: (280, 90)}), by_name)
    assert asked == [(0, "auto"), (3, "auto")]


def test_what_recomputation_does_not_count_is_left_out_of_what_it_fills() -> None:
    """Where the search refuses, a step that was fitted to 100 and takes 112 is fitted to 88."""
    options, asked = Options(Cluster.ideal(), budget=MemoryBudget(100)), list[float]()

    def compile_by(options: Options) -> Any:
        if options.budget.is_finite:
            raise MemoryBudgetError("the search says what conflicts")
        asked.append(options.recompute_budget.capacity_bytes)
        taken = 200 if asked[-1] == math.inf else asked[-1] + 12
        found = SimpleNamespace(taken=taken, recomputes_within=True, within=lambda budget: found)
        return found

    def memory(found: Any) -> Memory:
        return Memory((PlaceMemory(0, (0,), (), found.taken, "RUN f7", {}, ()),), 100, limit="memory_budget=100 B")

    found = within_budget(options, compile_by, memory, options.by_name(virtual_mesh(tp=2), is_placed=False))
    assert found.taken == 100 and asked == [math.inf, 100, 88]  # type: ignore[attr-defined]


def test_without_a_budget_nothing_is_counted() -> None:
    found, asked = compiled_with(math.inf, {0: 1e30})
    assert found.peak == 1e30 and asked == [math.inf]


def test_the_least_that_was_found_is_told_with_ways_out() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        compiled_with(100, {95: 130, 60: 110})
    text = str(caught.value)
    assert "no plan was found whose step fits into memory_budget=100 B: the least takes 110 B, 10 B too much, during RUN f7" in text
    assert "memory_budget='110 B'" in text and "80% of the batch" in text and 'optimizer="sgd": 20 B of state less' in text


def test_what_the_search_itself_refuses_is_its_own_error() -> None:
    with pytest.raises(MemoryBudgetError, match="the search says what conflicts"):
        compiled_with(100, {200: 300})


def refusing(budget: float, finds: dict[float, float], least: float) -> tuple[float, list[float]]:
    """What is found of what a search gives with so much, or more, of which it knows that no plan takes less than `least`."""
    asked: list[float] = []

    def compile_by(options: Options) -> Any:
        asked.append(options.budget.capacity_bytes)
        peak = next((peak for given, peak in finds.items() if asked[-1] >= given), None)
        if peak is None:
            raise MemoryBudgetError("the search says what conflicts", least)
        return SimpleNamespace(peak=peak, counted_bytes=math.inf, within=lambda _: SimpleNamespace(peak=peak, counted_bytes=math.inf))

    def memory(found: Any) -> Memory:
        return Memory((PlaceMemory(0, (0,), (), found.peak, "RUN f7", {}, ()),), budget)

    return within_budget(Options(Cluster.ideal(), budget=MemoryBudget(budget)), compile_by, memory).peak, asked  # type: ignore[attr-defined]


def test_what_is_offered_to_some_is_found_for_those_who_ask_for_more() -> None:
    """The search counts more than a step takes: with less than 200 it finds nothing, with 204 a step of 150."""
    finds = {400.0: 500.0, 300.0: 380.0, 200.0: 150.0}
    with pytest.raises(MemoryBudgetError, match="memory_budget='150 B'"):
        refusing(100, finds, least=200)
    for budget in (150, 160, 204, 300, 370):
        assert refusing(budget, finds, least=200)[0] == 150, budget


def test_less_than_no_plan_takes_less_than_is_not_asked_for() -> None:
    """Where 300 are allowed and 200 are the least, what is tried between is what may be found."""
    found, asked = refusing(300, {280.0: 600.0, 200.0: 290.0}, least=200)
    assert found == 290 and all(each >= 200 for each in asked[2:]), asked


def test_the_budget_that_a_refusal_names_is_enough() -> None:
    """Also where nothing could do with what was asked for, and the search knows no more than a bound."""
    case = gpt2(1).to(torch.float32)
    options = {"example_inputs": case.batch, "backend": "eager", "optimizer": torch.optim.AdamW}
    with pytest.raises(MemoryBudgetError, match="by the search's count a rank needs .* at the least") as caught:
        autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), memory_budget=1_000, **options)
    named = int(str(caught.value).splitlines()[-1].split("memory_budget='")[1].split(" B'")[0])
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), memory_budget=named, **options)
    assert parallel.memory().fits
    free = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), **options)
    assert named < 0.8 * free.memory().peak_bytes


def test_a_step_within_a_budget_takes_no_more_by_the_allocator() -> None:
    """Parameters are split over dp as well, so that what the search counts and what a step takes are apart."""
    case = gpt2(1).to(torch.float32)
    options = {"example_inputs": case.batch, "backend": "eager", "optimizer": torch.optim.AdamW}
    free = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), **options).memory()
    budget = 0.95 * free.peak_bytes
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2, tp=2), memory_budget=budget, **options)
    found = parallel.memory(measure=case.batch)
    assert found.fits and found.limit.startswith("memory_budget=")
    assert max(each.tracked_bytes for each in found.measured.values()) + found.fullest.kinds["optimizer"] <= budget


@pytest.mark.parametrize(("fits", "takes", "asked"), [(True, 99.0, [100.0, 88.0]), (False, None, [100.0])])
def test_what_is_moved_off_the_device_makes_up_for_what_was_not_counted(fits: bool, takes: float | None, asked: list[float]) -> None:
    """A step that was thought to fit takes 12 too much: 12 more are moved. Where all was moved already nobody is asked again."""
    limits: list[float] = []

    def compile_by(options: Options) -> Any:
        limits.append((options.limit or options.budget).capacity_bytes)
        steps = (SimpleNamespace(decision=Trips("host", (), (), fits)),)
        found = SimpleNamespace(peak=limits[-1] + 12, schedule_steps=steps, counted_bytes=math.inf, within=lambda budget: found)
        return found

    def memory(found: Any) -> Memory:
        return Memory((PlaceMemory(0, (0,), (), min(found.peak, 112.0) - (takes is not None and found.peak < 112), "RUN f7", {}, ()),), 100)

    options = Options(Cluster.ideal(), budget=MemoryBudget(100.0), offload=Offload(activations="host"))
    try:
        found = within_budget(options, compile_by, memory, options.by_name(virtual_mesh(tp=2), is_placed=False)[:1])
        assert fits and memory(found).peak_bytes == takes
    except MemoryBudgetError as error:
        assert not fits and "12 B too much" in str(error) and "Offload(activations='host') moves all" in str(error)
    assert limits[: len(asked)] == asked
