"""How ranks speak where their tensors are on devices."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import InputError
from autopar.runtime.execute.host_group import UnequalError, host_group
from autopar.runtime.execute.process_groups import ProcessGroups

DEVICE = torch.device("meta")  # in place of a GPU: nothing could be read there


@pytest.fixture
def world() -> Generator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def of_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dist.get_backend_config
    monkeypatch.setattr(dist, "get_backend_config", lambda group: asked(group).replace("cpu:gloo,", ""))


def test_a_group_of_its_own_where_the_other_takes_tensors_of_the_host_too(world: dist.ProcessGroup) -> None:
    """What ranks say is no part of a program, and may come while others run theirs."""
    made = host_group(world, [0], DEVICE, None)
    assert made.group is not world and dist.get_backend(made.group) == "gloo" and made.device == torch.device("cpu")


def test_a_world_of_nccl_alone_gets_a_group_of_gloo(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nccl_alone(monkeypatch)
    made: list[dict[str, Any]] = []
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append(options) or new_group(*args, **options))
    groups = ProcessGroups(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), timeout=30)
    assert groups.is_equal(3, "a number") and groups.gather("a word") == ["a word"] and groups.maxima([3, -2], "two") == [3, -2]
    assert [each.get("backend") for each in made] == ["gloo", None, "gloo"]  # that of the world, along dp, that of the mesh
    ProcessGroups(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), timeout=30)
    assert len(made) == 3, "made once"


def test_on_the_device_where_there_is_no_gloo(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nccl_alone(monkeypatch)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    made = host_group(world, [0], DEVICE, None)
    assert made.group is not world and made.device == DEVICE


def speaks_of_other_things() -> list[str]:
    """Rank 1 in each turn of something that the others do not, and then of the same."""
    groups, rank = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=120), dist.get_rank()
    turns: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: groups.maxima([1, 2, 3, 4], "four numbers"), lambda: groups.is_equal(7, "a number", "one number")),
        (lambda: groups.gather("a word", "words"), lambda: groups.maxima([], "nothing")),
        (lambda: groups.maxima([5], "a number of one"), lambda: groups.maxima([6], "a number of another", "é" * 400)),
    ]
    found = []
    for ours, other in turns:
        with pytest.raises(InputError) as caught:
            other() if rank == 1 else ours()
        assert caught.value.is_told and groups.gather(rank) == [0, 1, 2, 3] and groups.maxima([rank], "a rank") == [3]
        found.append(str(caught.value))
    return found


def test_ranks_that_speak_of_other_things_all_hear_of_it(gloo_ranks: Any) -> None:
    """Two all-reduces of other lengths end a process, and those of one length would take each other's numbers."""
    said = gloo_ranks.run(speaks_of_other_things)
    assert said[0] == said[1] == said[2] == said[3]
    assert "\n  ranks 0, 2, 3: four numbers\n  rank 1: one number\n" in said[0][0]
    assert "\n  ranks 0, 2, 3: words\n  rank 1: nothing\n" in said[0][1]
    assert f"\n  ranks 0, 2, 3: a number of one\n  rank 1: {'é' * 256}\n" in said[0][2]


def expects(is_one_apart: bool) -> list[str]:
    """What comes of one number on all ranks, of two, of two that are given up, and what is said when something else is said next."""
    groups, rank = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=120), dist.get_rank()
    number = rank if is_one_apart else 3
    found: list[str] = []
    for say in (groups.hear, lambda: groups.is_equal(3, "another number"), lambda: groups.gather(rank)):
        groups.expect_equal(number, "a number")
        assert groups.is_expecting
        try:
            found.append(str(say()))
        except UnequalError:
            found.append("unequal")
        assert not groups.is_expecting
    groups.expect_equal(number, "a number")
    groups.give_up()
    return [*found, str(groups.gather(rank))]


@pytest.mark.parametrize(
    ("is_one_apart", "heard"),
    [(False, ["None", "True", "[0, 1, 2, 3]", "[0, 1, 2, 3]"]), (True, ["unequal", "unequal", "unequal", "[0, 1, 2, 3]"])],
)
def test_what_is_expected_is_heard_before_anything_else_is_said(gloo_ranks: Any, is_one_apart: bool, heard: list[str]) -> None:
    assert gloo_ranks.run(expects, is_one_apart) == [heard] * 4


def expects_where_one_waits() -> list[str]:
    """Rank 1 waits for the answer that the others expect, and then all are at something else."""
    groups, rank = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=120), dist.get_rank()
    found: list[str] = []
    for what in ("a number", "a number" if rank != 1 else "a word"):
        try:
            if rank == 1:
                found.append(str(groups.is_equal(3, what)))
            else:
                groups.expect_equal(3, what)
                groups.hear()
                found.append("True")
        except InputError as error:
            found.append(str(error))
    return found


def test_some_ranks_wait_and_others_do_not(gloo_ranks: Any) -> None:
    for equal, apart in gloo_ranks.run(expects_where_one_waits):
        assert equal == "True" and "ranks 0, 2, 3: a number" in apart and "rank 1: a word" in apart
