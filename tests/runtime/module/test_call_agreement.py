"""Ranks agree on a call while what no other rank hears of runs already; where they do not, nothing of that remains."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.distributed_world import DistributedWorld
from tests.support.ranks import GlooRanks, share


class Drops(nn.Module):
    """With a count that forward writes, and numbers drawn, at every call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layers(x).square().mean()


def model() -> Drops:
    torch.manual_seed(0)
    return Drops().double()


def batch(number: int, samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))}


def steps(mesh: Any, sizes: list[tuple[int, ...]], trains: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of these shares of batches, the parameters behind them, and the steps that drew."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "train_step": autopar.TrainStep()} if trains else {}
    parallel = autopar.compile(model(), mesh, backend="eager", cluster=autopar.Cluster.ideal(), **options)
    losses = []
    optimizer = None
    for number, shares in enumerate(sizes):
        whole = batch(number, sum(shares))
        mine = whole if isinstance(mesh, autopar.Mesh) else {"x": whole["x"].split(list(shares))[dist.get_rank() // 2]}
        if trains:
            losses.append(float(parallel.train_step(**mine)))
            continue
        loss = parallel(**mine)
        loss.backward()
        optimizer = optimizer or torch.optim.SGD(parallel.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, parallel.full_state_dict(), parallel.step


def on_ranks(sizes: list[tuple[int, ...]], trains: bool) -> tuple[list[float], dict[str, Tensor], int]:
    return steps(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), sizes, trains)


@pytest.mark.parametrize("trains", [False, True])
def test_a_call_that_began_with_other_shares_leaves_nothing(gloo_ranks: GlooRanks, trains: bool) -> None:
    """Two equal steps, one of unequal shares, which is known once the equal program has begun on some ranks, and an equal one: numbers
    are drawn, and counts count, once a step."""
    sizes = [(4, 4), (4, 4), (4, 2), (3, 4), (4, 4)]
    wanted, state, number = steps(autopar.virtual_mesh(dp=2, tp=2), sizes, trains)
    for losses, found, drawn in gloo_ranks.run(on_ranks, sizes, trains):
        assert drawn == number == len(sizes)
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)


class TwoHeads(nn.Module):
    """Each of whose results other parameters reach."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).square().mean(), self.two(x).square().mean()


@contextmanager
def noted() -> Generator[list[str]]:
    """What a rank says, and when it begins to run."""
    said: list[str] = []

    def told(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def calls(self: Any, *args: Any, **options: Any) -> Any:
            said.append(name)
            return real(self, *args, **options)

        patch.setattr(owner, name, calls)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_equal", "expect_equal", "expect_meeting", "hear", "gather", "_summed"):
            told(DistributedWorld, name)
        told(Call, "_run")
        yield said


def order_of_a_step(make: type[nn.Module]) -> list[list[str]]:
    """Of the first call and of the third."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parallel = autopar.compile(make().double(), mesh, backend="eager", outputs="all")
    orders: list[list[str]] = []
    with noted() as said:
        for number in range(3):
            said.clear()
            found = parallel(**share(batch(number, 8), mesh))
            (found if isinstance(found, Tensor) else sum(found)).backward()
            orders.append(list(said))
    return [orders[0], orders[2]]


@pytest.mark.parametrize("make", [Drops, TwoHeads])
def test_nobody_waits_for_a_word_before_a_call(gloo_ranks: GlooRanks, make: type[nn.Module]) -> None:
    for first, third in gloo_ranks.run(order_of_a_step, make):
        assert "is_equal" in first and "expect_equal" not in first
        assert third == ["expect_equal", "_run", "hear", "_run", "expect_meeting", "_run", "hear", "_run"]


def backward_by_own_factors() -> tuple[list[str], float]:
    """The order of a third step whose losses have a factor on each rank, and how far its gradients are off."""
    torch.manual_seed(0)
    mesh, reference = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), TwoHeads().double()
    parallel = autopar.compile(copy.deepcopy(reference), mesh, backend="eager", outputs="all")
    with noted() as said:
        for number in range(3):
            said.clear()
            parallel.zero_grad()
            one, two = parallel(**share(batch(number, 8), mesh))
            (one * (1.0 + dist.get_rank()) + two).backward()
    one, two = reference(**batch(2, 8))
    (one * 2.5 + two).backward()
    pairs = zip(parallel.parameters(), reference.parameters(), strict=True)
    return said, max(float((ours.grad.full_tensor() - plain.grad).abs().max()) for ours, plain in pairs)  # pyright: ignore


def test_a_backward_that_began_with_other_factors_begins_again(gloo_ranks: GlooRanks) -> None:
    for said, off in gloo_ranks.run(backward_by_own_factors):
        assert said[4:] == ["expect_meeting", "_run", "hear", "gather", "_summed", "_summed", "_run"] and off < 1e-12


def calls_of_other_kinds() -> list[str]:
    """One rank evaluates where the others train, and then all train."""
    parallel = autopar.compile(model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), backend="eager", timeout=120)
    said: list[str] = []
    for number in range(4):
        try:
            with torch.set_grad_enabled(number != 2 or dist.get_rank() != 1):
                parallel(**batch(number, 4))
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


def test_a_call_that_is_no_other_ranks_is_told_of_and_the_next_one_runs(gloo_ranks: GlooRanks) -> None:
    for *before, differs, after in gloo_ranks.run(calls_of_other_kinds):
        assert before == ["", ""] and "grad mode (True and False)" in differs and not after


def fails_alone() -> list[str]:
    """A batch on which rank 1's program raises before any other hears of it; nobody waits on its way, since its peers raise, too."""
    parallel = autopar.compile(model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), backend="eager", timeout=120)
    said: list[str] = []
    real = Call.begin
    for number in range(4):
        if number == 2:

            def begin(self: Call) -> None:
                raise ValueError("a bad batch")

            Call.begin = begin
        try:
            parallel(**batch(number, 4))
            said.append("")
        except ValueError as error:
            said.append(str(error))
        finally:
            Call.begin = real
    return said


def test_what_is_expected_is_given_up_by_a_call_that_raises(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks.run(fails_alone) == [["", "", "a bad batch", ""]] * 4


def leaves_a_backward_out() -> list[str]:
    """Where rank 1 leaves out a backward all are refused; then all go on, drawing the same numbers."""
    parallel = autopar.compile(model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), backend="eager", timeout=120)
    said: list[str] = []
    for number in range(7 if dist.get_rank() == 1 else 6):  # the first that is refused is a call of its own
        try:
            loss = parallel(**batch(number, 4))
            if number != 2 or dist.get_rank() != 1:
                loss.backward()
            said.append("")
        except InputError as error:
            said.append(str(error))
    return [*said, str(parallel.step)]


def test_a_call_that_others_are_not_at_counts_no_step(gloo_ranks: GlooRanks) -> None:
    for rank, found in enumerate(gloo_ranks.run(leaves_a_backward_out)):
        told = next(place for place, each in enumerate(found) if each)
        assert told == (3 if rank == 1 else 2) and "not at the same place of the training loop" in found[told]
        assert not any(found[told + 1 : -1]) and found[-1] == "6", found


def test_a_copy_keeps_to_itself(gloo_ranks: GlooRanks) -> None:
    assert set(gloo_ranks.run(two_modules_in_turns)) == {True}


def two_modules_in_turns() -> bool:
    """Both speak by one group: what one expects is heard before the other says a word."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = autopar.compile(model(), mesh, backend="eager", cluster=autopar.Cluster.ideal())
    second = autopar.compile(copy.deepcopy(model()), mesh, backend="eager", cluster=autopar.Cluster.ideal())
    off = 0.0
    for number in range(4):
        x = batch(number, 4)
        one, two = first(**x), second(**x)
        (one + two).backward()
        off = max(off, abs(float(one - two)))
    return off == 0.0
