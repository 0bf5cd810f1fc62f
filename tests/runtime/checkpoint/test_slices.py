"""Slices, against index arithmetic of torch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.checkpoint.slices import MAX_CELLS, Runs, are_apart, copy, problem_of, runs_of, shape_of, tiling_problem, whole

THIRDS = ((4, 8), (12, 16), (20, 24))


def indices_of(runs: Runs) -> torch.Tensor:
    return torch.tensor([index for start, stop in runs for index in range(start, stop)], dtype=torch.int64)


@given(st.sets(st.integers(0, 30)))
def test_runs_are_the_shortest_form_of_indices(indices: set[int]) -> None:
    runs = runs_of(torch.tensor(sorted(indices), dtype=torch.int64))
    assert indices_of(runs).tolist() == sorted(indices)
    assert all(before[1] < after[0] for before, after in zip(runs, runs[1:], strict=False))


@given(st.tuples(*[st.sets(st.integers(0, 8))] * 2), st.tuples(*[st.sets(st.integers(0, 8))] * 2))
def test_what_two_parts_share_is_copied(first: tuple[set[int], set[int]], second: tuple[set[int], set[int]]) -> None:
    tensor = torch.arange(81).view(9, 9)
    has, wants = (tuple(runs_of(torch.tensor(sorted(each), dtype=torch.int64)) for each in part) for part in (first, second))
    source, target = (tensor[indices_of(part[0])][:, indices_of(part[1])].clone() for part in (has, wants))
    wanted = torch.where(torch.isin(target, source), target, -1)
    copy(source, has, target.fill_(-1), wants)
    assert torch.equal(target, wanted)
    assert are_apart(has, wants) == bool((wanted == -1).all())


def test_a_tensor_without_dims_or_elements_is_one_piece() -> None:
    assert whole(()) == () and shape_of(()) == () and whole((0, 3)) == ((), ((0, 3),)) and shape_of(whole((0, 3))) == (0, 3)
    assert not problem_of(whole((0, 3)), (0, 3)) and not tiling_problem([whole((0, 3))], (0, 3)) and not tiling_problem([()], ())
    target = torch.zeros(())
    copy(torch.tensor(3.0), (), target, ())
    assert target == 3


def test_slices_beyond_a_tensor_are_found() -> None:
    assert not problem_of((THIRDS, ((0, 4),)), (24, 4))
    assert "do not ascend within a dim of 23" in problem_of((THIRDS, ((0, 4),)), (23, 4))
    assert "do not ascend" in problem_of((((4, 8), (7, 9)),), (24,)) and "do not ascend" in problem_of((((3, 3),),), (24,))
    assert problem_of((((0, 4),),), (24, 4)) == "slices of 1 dims for 2"


def test_pieces_that_do_not_tile_are_found() -> None:
    other = ((0, 4), (8, 12), (16, 20))
    rows = ((0, 4),)
    assert not tiling_problem([(THIRDS, rows), (other, rows)], (24, 4))
    assert tiling_problem([(THIRDS, rows)], (24, 4)) == "elements are in no piece"
    assert tiling_problem([(THIRDS, rows), (THIRDS, rows)], (24, 4)) == "pieces overlap, or elements are in none"
    assert tiling_problem([(THIRDS, rows), (other, rows), (((0, 1),), rows)], (24, 4)) == "pieces overlap, or elements are in none"
    single = tuple((place, place + 1) for place in range(0, 20_000, 2))
    half = (single, ((0, 20_000),))
    assert not tiling_problem([half, (tuple((start + 1, stop + 1) for start, stop in single), ((0, 20_000),))], (20_000, 20_000))
    square, shape = (single, single), (20_000, 20_000)
    assert "cells" in tiling_problem([square] * 4, shape) and 20_000**2 > MAX_CELLS
