"""The least of a conversion against every combination of states."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.partition.solver.assignment import conversion_seconds
from autopar.partition.solver.min_marginals import MarginalTable, Parts, min_marginals_of
from autopar.partition.solver.tables import NO_WAY, Array, Conversion

# What is needed: 0 is whole, 1 and 2 are slices of it, 3 is a slice of 1. What is given: 4, unreduced, or 0.
SLICES = {(0, 1), (0, 2), (0, 3), (1, 3)}
NEEDED = range(4)


def conversion(num_readers: int, price: Array) -> Conversion:
    slices = np.array([[0.0 if a == b or (a, b) in SLICES else NO_WAY for b in NEEDED] for a in NEEDED])
    cuts = np.array([[NO_WAY] * 4, slices[0]])
    every = np.arange(4)
    return Conversion(
        (0, *range(1, num_readers + 1)), (np.arange(2), *[every] * num_readers), np.where(cuts == 0, 0.0, price), cuts, slices
    )


def exhaustive(made: Conversion, potentials: list[Array], port: int) -> list[float]:
    """By state of the port, over all states of the others."""
    given_state = {0: 4, 1: 0}
    found = [np.inf] * len(potentials[port])
    for states in itertools.product(*(range(len(each)) for each in potentials)):
        prices = {(given_state[states[0]], target): float(seconds) for target, seconds in enumerate(made.price[states[0]])}
        seconds = conversion_seconds(given_state[states[0]], states[1:], lambda a, b: (a, b) in SLICES, lambda a, b, of=prices: of[a, b])
        seconds += sum(float(each[state]) for number, (each, state) in enumerate(zip(potentials, states, strict=True)) if number != port)
        found[states[port]] = min(found[states[port]], seconds)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_a_table_is_exact_and_parts_are_no_more(seed: int, num_readers: int) -> None:
    draw = np.random.default_rng(seed)
    made = conversion(num_readers, draw.random((2, 4)))
    own = [np.arange(2), *[np.arange(4)] * num_readers]
    potentials = [draw.random(len(each)) for each in own]
    for port in range(num_readers + 1):
        best = exhaustive(made, potentials, port)
        assert MarginalTable(made, own).min_marginals(potentials, port) == pytest.approx(best)
        if num_readers > 1:
            parts = Parts(made, own)
            assert (parts.min_marginals(potentials, port) <= np.array(best) + 1e-12).all()
            # Again with one reader's potentials replaced: what was kept of it is worked out anew.
            changed = [*potentials[:-1], potentials[-1] + 1.0]
            assert parts.min_marginals(changed, port) == pytest.approx(Parts(made, own).min_marginals(changed, port))


def test_parts_are_exact_where_two_readers_share_no_more_than_one_state() -> None:
    made = conversion(2, np.array([[5.0, 4.0, 4.0, 3.0]] * 2))
    own = [np.arange(2), np.array([1, 3]), np.array([2])]
    potentials = [np.zeros(len(each)) for each in own]
    for port in range(3):
        assert Parts(made, own).min_marginals(potentials, port) == pytest.approx(MarginalTable(made, own).min_marginals(potentials, port))
    # Brought whole for 5, of which 1 and 2 are slices, or 3 and 2 for 3 + 4; the whole is not dearer.
    assert MarginalTable(made, own).min_marginals(potentials, 0).tolist() == [7.0, 0.0]


def test_ports_know_the_states_that_are_left_alone() -> None:
    made = conversion(1, np.array([[5.0, 4.0, 4.0, 3.0]] * 2))
    way = min_marginals_of(made, [np.array([0]), np.array([0, 3])])
    assert way.min_marginals([np.zeros(1), np.zeros(2)], 1).tolist() == [5.0, 3.0]


@pytest.mark.parametrize(("num_readers", "num_states"), [(24, 4), (31, 4), (32, 4), (63, 2), (64, 2), (100, 1)])
def test_a_value_that_many_read_has_no_table(num_readers: int, num_states: int) -> None:
    """4 ** 32 is nothing in 64 bits, and arrays have at most 64 dims."""
    made = conversion(num_readers, np.array([[5.0, 4.0, 4.0, 3.0]] * 2))
    own = [np.arange(2), *[np.arange(num_states)] * num_readers]
    way = min_marginals_of(made, own)
    zeros = [np.zeros(len(each)) for each in own]
    assert isinstance(way, Parts) and all(np.isfinite(way.min_marginals(zeros, port)).all() for port in (0, 1, num_readers))
