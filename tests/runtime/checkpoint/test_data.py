"""The position in the data is saved and goes on, of loaders as torchdata's StatefulDataLoader is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import CheckpointError
from autopar.runtime.checkpoint.data import Position, joined
from tests.support.checkpoints import parallel_on


class Loader:
    """What torchdata documents of a StatefulDataLoader: an iterable whose state, with a snapshot of each worker, goes on in the middle of
    an epoch; load_state_dict is called before it is iterated."""

    def __init__(self, size: int = 20, first: int = 0, extra: Any = None) -> None:
        self.generator = torch.Generator().manual_seed(first)
        self.order = first + torch.randperm(size, generator=self.generator)
        self.yielded, self.extra = 0, extra

    def __len__(self) -> int:
        raise TypeError("of an IterableDataset nobody knows the length")

    def __iter__(self) -> Any:
        while self.yielded < len(self.order):
            self.yielded += 1
            yield int(self.order[self.yielded - 1])

    def state_dict(self) -> dict[str, Any]:
        sampler = {"samples_yielded": self.yielded, "generator": self.generator.get_state(), "order": self.order}
        return {
            "_snapshot": {"_main_snapshot": {"_sampler_iter_state": sampler, "_shared_seed": None}, "_worker_snapshots": {0: (1.5, "a")}},
            "_steps_since_snapshot": 0,
            "_iterator_finished": False,
            **({} if self.extra is None else {"extra": {"deep": [self.extra]}}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["_snapshot"]["_worker_snapshots"] == {0: (1.5, "a")} and state["_iterator_finished"] is False
        sampler = state["_snapshot"]["_main_snapshot"]["_sampler_iter_state"]
        self.yielded, self.order = sampler["samples_yielded"], sampler["order"]
        self.generator.set_state(sampler["generator"])


def drawn(loader: Loader, number: int) -> list[int]:
    numbers = iter(loader)
    return [next(numbers) for _ in range(number)]


@pytest.fixture(scope="module")
def parallel() -> autopar.ParallelModule:
    return parallel_on({"dp": 2})


@pytest.mark.parametrize("blocking", [True, False])
def test_a_loader_goes_on_where_it_stood(tmp_path: Path, parallel: autopar.ParallelModule, blocking: bool) -> None:
    loader = Loader()
    drawn(loader, 7)
    future = autopar.save(tmp_path, parallel, data=loader, blocking=blocking)  # type: ignore[call-overload]
    rest = drawn(loader, 13)
    if not blocking:
        future.result()
    other = Loader(first=5)
    assert autopar.load(tmp_path, parallel, data=other) is None
    assert drawn(other, 13) == rest and torch.equal(other.generator.get_state(), loader.generator.get_state())


def test_a_forgotten_loader_is_told_of(tmp_path: Path, parallel: autopar.ParallelModule) -> None:
    loader, fresh = Loader(), Loader(first=3)
    drawn(loader, 7)
    autopar.save(tmp_path / "with", parallel, data=loader)
    autopar.save(tmp_path / "without", parallel)
    with pytest.raises(
        CheckpointError, match="has a position in the data: pass data=, the loader, which then goes on there, or data=False"
    ):
        autopar.load(tmp_path / "with", parallel)
    with pytest.raises(CheckpointError, match="has no position in the data: leave out data=, or pass it to autopar.save"):
        autopar.load(tmp_path / "without", parallel, data=fresh)
    autopar.load(tmp_path / "with", parallel, data=False)
    autopar.load(tmp_path / "with", parallel, model_only=True)
    assert fresh.yielded == 0
    with pytest.raises(CheckpointError, match=r"data= is a DataLoader, which has no state_dict\(\) and load_state_dict\(\)"):
        autopar.save(tmp_path / "with", parallel, data=torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("extra", [b"bytes", {1, 2}, Path("x")])
def test_what_would_be_pickled_is_refused_by_its_place(tmp_path: Path, parallel: autopar.ParallelModule, extra: Any) -> None:
    kind = type(extra).__name__
    with pytest.raises(CheckpointError, match=rf"the state of data= at place 0 along dp cannot be saved: '0/extra/deep/0' is a {kind}"):
        autopar.save(tmp_path, parallel, data=Loader(extra=extra))
    assert not list(tmp_path.glob("0*"))


def on_ranks(folder: str) -> list[Any]:
    """Two loaders of their own, saved by four ranks, go on along dp = 2 and nowhere else; equal ones anywhere where that is asked for."""
    place = dist.get_rank() // 2
    parallel, loader, found = parallel_on({"dp": 2, "tp": 2}, real=True), Loader(first=100 * place), []
    drawn(loader, 3 + place)
    autopar.save(folder + "/own", parallel, data=loader)
    other = Loader()
    autopar.load(folder + "/own", parallel, data=other)
    found.append(drawn(other, 5) == drawn(loader, 5))
    same = Loader()
    drawn(same, 4)
    autopar.save(folder + "/same", parallel, data=same)
    elsewhere, other = parallel_on({"dp": 4}, real=True), Loader()
    try:
        autopar.load(folder + "/same", elsewhere, data=Loader())
    except CheckpointError as error:
        found.append(str(error))
    autopar.load(folder + "/same", elsewhere, data=other, global_data=True)
    found.append(drawn(other, 5) == drawn(same, 5))
    try:
        autopar.load(folder + "/own", elsewhere, data=Loader(), global_data=True)
    except CheckpointError as error:
        found.append(str(error))
    return found


def test_loaders_of_processes(gloo_ranks: Any, tmp_path: Path) -> None:
    for goes_on, unclear, is_shared, refusal in gloo_ranks.run(on_ranks, str(tmp_path)):
        assert goes_on and is_shared
        assert "of 2 loaders along dp, which say the same: where the global batch stands, or, as with a DistributedSampler" in unclear
        assert "has the positions of 2 loaders along dp, which stood at samples of their own; here there are 4 places along dp" in refusal


def test_ranks_that_feed_the_same_must_stand_alike() -> None:
    here, there = Position(1, {"n": 3, "t": {"tensor": "1/t"}}, {"1/t": "a"}), Position(1, {"n": 4, "t": {"tensor": "1/t"}}, {"1/t": "a"})
    with pytest.raises(
        CheckpointError, match=r"data= of ranks 0 and 1, which feed the same samples \(place 1 along dp\), stands elsewhere"
    ):
        joined([here, there])
    with pytest.raises(CheckpointError, match="some ranks pass data= and others none"):
        joined([here, None])
    alike = Position(0, {"n": 3, "t": {"tensor": "0/t"}}, {"0/t": "a"})
    assert joined([alike, here]) == {"places": 2, "states": [alike.state]} and joined([None, None]) is None
