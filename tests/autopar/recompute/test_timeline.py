"""What a segment is said to keep, need and take is what the written program does."""

from __future__ import annotations

import random
from functools import cache

import pytest

from autopar.cost.model import CostModel
from autopar.ir.program import Program
from autopar.pipeline.stage_work import Work
from autopar.recompute.again import computed_again
from autopar.recompute.choices import within
from autopar.recompute.inside import InsideBytes
from autopar.recompute.layer_values import Layer, layers_of
from autopar.recompute.min_cut import KeptValue
from autopar.recompute.segments import segments
from autopar.recompute.timeline import BackwardCall, ForwardCall, Timeline
from autopar.recompute.walk import trace, walk
from tests.support.captures import compiled
from tests.support.models import zoo


@cache
def gpt2() -> tuple[Program, CostModel, tuple[Layer, ...]]:
    case = zoo.gpt2(2)
    parallel = compiled(case.model, {"dp": 1}, case.batch, cluster="cpu", optimizer="sgd")
    program = next(step.program for step in parallel.compiled.steps if step.name == "choose order")
    groups, cost = segments(program), parallel.compiled.cost
    return program, cost, tuple(layers_of(Work(program), cost, dict(groups), dict.fromkeys(groups, 0), within(program, groups)))


@pytest.mark.parametrize("place", range(4))
def test_it_is_what_the_written_program_comes_to(place: int) -> None:
    program, cost, layers = gpt2()
    layer = layers[place]
    timeline, draw = layer.timeline(trace(Work(program), cost, 0, InsideBytes(cost))), random.Random(place)
    assert timeline.decisions
    for _ in range(5):
        chosen = [each for each in timeline.decisions if draw.random() < 0.5]
        again = timeline.closed(number for each in chosen for number in each)
        assert again is not None
        thought = timeline.memory(again)
        found = walk(Work(computed_again(program, layer.names(again))), cost, 0, InsideBytes(cost)).layers[layer.name]
        assert thought.kept_bytes == found.kept_bytes and thought.own_bytes == found.own_bytes
        assert thought.seconds == pytest.approx(found.seconds, rel=1e-2)  # views are copied besides


def drawn() -> Timeline:
    """x → a → b → c, each of 10 bytes, that the backward reads last first; what it makes takes 1 byte."""
    values = [KeptValue(float("inf"), 0.0, (), False), *(KeptValue(1.0, 10.0, (number,), True) for number in range(3))]
    backward = [BackwardCall((number,), 1.0, 1.0) for number in (3, 2, 1)]
    return Timeline(values, [0.0, 10.0, 10.0, 10.0], frozenset({1, 2, 3}), backward, [ForwardCall(10.0 * n, (n,)) for n in (1, 2, 3)])


def test_a_copy_is_there_from_its_first_reader_to_its_last() -> None:
    timeline = drawn()
    nothing, last, chain = (timeline.memory(frozenset(each)) for each in ((), (3,), (1, 2, 3)))
    assert (nothing.kept_bytes, nothing.own_bytes, nothing.seconds) == (30.0, 31.0, 0.0)
    assert (last.kept_bytes, last.own_bytes, last.seconds) == (20.0, 31.0, 1.0)
    # Each of the chain waits for its own reader.
    assert (chain.kept_bytes, chain.own_bytes, chain.seconds) == (0.0, 31.0, 3.0)
    first = timeline.memory(frozenset({1}))
    assert (first.kept_bytes, first.own_bytes) == (20.0, 21.0)
