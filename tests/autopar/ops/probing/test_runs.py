"""The parts that probing cuts, and the calls that it tries."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.probing.runs import joined, larger_trials, small_trials, take
from autopar.testing.prove import instance

aten = torch.ops.aten


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_joined_is_the_inverse_of_take(dim: int, count: int, strided: bool) -> None:
    value = torch.arange(72).reshape(6, 12)
    parts = [take(value, dim, count, index, strided) for index in range(count)]
    assert {part.shape[dim] for part in parts} == {value.shape[dim] // count}
    assert torch.equal(joined(parts, dim, strided), value)


def test_operands_are_small_and_equal_sizes_stay_equal() -> None:
    trials = small_trials(instance(aten.mm.default, torch.empty(4096, 512), torch.empty(512, 4096)))
    assert len(trials) == 3
    assert {tuple(value.shape for value in trial.values) for trial in trials} == {((12, 6), (6, 12))}
    assert {value.dtype for trial in trials for value in (*trial.values, *trial.results)} == {torch.float64}


def test_every_reading_of_the_literals_under_which_the_op_runs_is_tried() -> None:
    """The shape must be mapped with the operands; the position is a mere number."""
    trials = small_trials(instance(aten.select_backward.default, torch.empty(64, 128), [64, 3, 128], 1, 2))
    assert {str(trial.args[1:]) for trial in trials} == {"([6, 3, 12], 1, 2)"}
    bounds = small_trials(instance(aten.clamp.default, torch.empty(64, 128), -3000, 64))
    assert {trial.args[1:] for trial in bounds} == {(-3000, 64), (-3000, 6), (2, 6), (3, 6)}


def test_dims_of_size_1_stay() -> None:
    (shapes,) = {
        tuple(value.shape for value in trial.values) for trial in small_trials(instance(aten.add.Tensor, torch.empty(8, 1), torch.empty(4)))
    }
    assert shapes == ((12, 1), (6,))


def test_integers_may_index_and_are_not_cut_to_single_elements() -> None:
    trial = small_trials(instance(aten.embedding.default, torch.empty(32, 8), torch.empty(4, dtype=torch.int64)))[0]
    assert trial.values[1].max() <= 1 and trial.counts(6) == (3, 2)
    assert small_trials(instance(aten.exp.default, torch.empty(32)))[0].counts(6) == (6, 3, 2)


def test_larger_operands_are_the_graphs_own_or_no_more_than_a_few_megabytes() -> None:
    def shape(*sizes: int) -> tuple[int, ...]:
        (trial,) = larger_trials(instance(aten.exp.default, torch.empty(sizes, device="meta")))
        return tuple(trial.values[0].shape)

    assert shape(40, 60) == (40, 60)
    assert shape(4096, 65536) == (24, 48)
