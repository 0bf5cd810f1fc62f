"""What ranks tell each other before they go on."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import AutoparError, MicrobatchError, PlanError
from autopar.runtime.execute.agreement import from_first
from autopar.runtime.execute.process_groups import ProcessGroups


class OneOfTwo:
    """A world of two ranks in turn: rank 1 is given what rank 0 brought."""

    def __init__(self, rank: int, brought: list[Any]) -> None:
        self.ranks, self.brought = (rank,), brought

    def gather(self, value: Any, what: str = "") -> list[Any]:
        self.brought.append(value)
        return self.brought


def test_any_failure_of_rank_0_reaches_the_other_ranks() -> None:
    brought: list[Any] = []

    def fail() -> str:
        raise ZeroDivisionError("a solver's bug")

    with pytest.raises(ZeroDivisionError):
        from_first(OneOfTwo(0, brought), fail)  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="rank 0 failed: ZeroDivisionError: a solver's bug") as caught:
        from_first(OneOfTwo(1, brought), fail)  # type: ignore[arg-type]
    assert not isinstance(caught.value, PlanError), "rank 0 is gone: who tried another plan would wait for it"


def test_a_refusal_of_rank_0_is_of_its_kind_on_the_other_ranks() -> None:
    """They all try again with fewer microbatches, or none does."""
    brought: list[Any] = []

    def refuse() -> str:
        raise MicrobatchError("4 would change what the model computes", ("a mean",))

    for rank, text in ((0, "^4 would"), (1, "^rank 0 found no plan: 4 would")):
        world = OneOfTwo(rank, brought)
        with pytest.raises(MicrobatchError, match=text) as caught:
            from_first(world, refuse)  # type: ignore[arg-type]
        assert caught.value.found == ("a mean",)
        brought = pickle.loads(pickle.dumps(brought))


def compares_numbers() -> list[bool]:
    groups, rank = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))), dist.get_rank()
    told = ([0] * 4, [2**56 - 1] * 4, [0, 0, 0, 1], [5, 4, 4, 4], [3, 7, 7, 3])
    return [groups.is_equal(numbers[rank], "a test") for numbers in told]


def test_ranks_know_whether_they_hold_one_number(gloo_ranks: Any) -> None:
    assert gloo_ranks.run(compares_numbers) == [[True, True, False, False, False]] * 4
