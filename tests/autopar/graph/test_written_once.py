"""Buffers that a step changes once, whatever its microbatches: which they are, and that they and their readers are as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.checks.local import check_local
from autopar.errors import MicrobatchError
from autopar.graph.written_once import written_once
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.local.lower import Lower
from autopar.passes.local.separate_microbatches import SeparateMicrobatches
from tests.support.captures import compiled
from tests.support.programs import passed


class Stepping(nn.Module):
    """Two layers; `change(module, x)` changes buffers, and what it gives is a factor of the loss."""

    def __init__(self, change: Callable[[Stepping, Tensor], Tensor | float]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(8, 16), nn.Linear(16, 4), change
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("decay", torch.tensor([0.5, 0.25]))
        self.register_buffer("total", torch.tensor(1.0))
        self.register_buffer("other", torch.tensor(7.0))
        self.calls: Tensor
        self.decay: Tensor
        self.total: Tensor
        self.other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        factor = self.change(self, x)
        return self.last(self.first(x).relu()).square().mean() * factor


def counted(module: Stepping, x: Tensor) -> float:
    module.calls += 1
    return 1.0


def read_afterwards(module: Stepping, x: Tensor) -> Tensor:
    module.calls += 1
    return module.calls * 0.1 + (module.calls > 4)


def of_another(module: Stepping, x: Tensor) -> Tensor:
    """The second is made of the first and of what it was itself, the third of a parameter."""
    module.calls += 1
    module.decay.mul_(0.9).add_(1.0 / module.calls)
    module.total.copy_(module.first.weight.detach().norm() + 0.5 * module.total)
    return module.decay.sum() + module.total


def of_one_value(module: Stepping, x: Tensor) -> Tensor:
    """Two buffers that become the same."""
    module.total.mul_(2.0)
    module.other.copy_(module.total)
    return module.total + module.other


def read_before(module: Stepping, x: Tensor) -> Tensor:
    factor = module.calls * 0.1
    module.calls += 1
    return factor


def read_on_the_way(module: Stepping, x: Tensor) -> Tensor:
    half = module.total * 0.5
    module.total.copy_(half + 1)
    return half


def of_one_that_changes_with_the_batch(module: Stepping, x: Tensor) -> float:
    module.total.mul_(x.square().mean())
    module.decay.add_(module.total)
    module.calls += 1
    return 1.0


def both_ways(module: Stepping, x: Tensor) -> Tensor:
    """Each is made of what the other was, and both are read as they were and as they are."""
    before = module.total * module.other
    total = module.total.clone()
    module.total.add_(module.other * 0.1)
    module.other.mul_(total)
    return before + module.total / module.other


FITTING = {
    counted: {"calls"},
    read_afterwards: {"calls"},
    of_another: {"calls", "decay", "total"},
    of_one_value: {"total", "other"},
    read_before: {"calls"},
    read_on_the_way: {"total"},
    both_ways: {"total", "other"},
}
OTHERS = {of_one_that_changes_with_the_batch: {"total", "decay"}}
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("change", [*FITTING, *OTHERS])
def test_which_they_are(change: Callable[[Stepping, Tensor], Tensor | float]) -> None:
    changed = {"calls", "decay", "total"} if change in (of_another, of_one_that_changes_with_the_batch) else (FITTING | OTHERS)[change]
    found = written_once(passed(Stepping(change), (X,), TraceJoint))
    assert found.keys() == changed - OTHERS.get(change, set())


@pytest.mark.parametrize("change", FITTING)
@pytest.mark.parametrize(("mesh", "number"), [({"pp": 2}, 2), ({"dp": 2}, 4), ({"dp": 2}, 1), ({"pp": 2, "dp": 2}, 2)])
def test_they_and_their_readers_are_as_on_one_device(
    change: Callable[[Stepping, Tensor], Tensor | float], mesh: dict[str, int], number: int
) -> None:
    torch.manual_seed(0)
    model = Stepping(change)
    reference = copy.deepcopy(model)
    parallel = compiled(model, mesh, (X,), num_microbatches=number)
    for _ in range(3):
        losses = []
        for module in (parallel, reference):
            module.zero_grad()
            losses.append(module(X))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
        for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert parallel.verify(X, promote=True).worst <= 1e-9


@pytest.mark.parametrize("change", OTHERS)
def test_others_are_refused_by_name(change: Callable[[Stepping, Tensor], Tensor | float]) -> None:
    with pytest.raises(MicrobatchError, match=f"the buffer '({'|'.join(OTHERS[change])})' is changed anew by every microbatch"):
        compiled(Stepping(change), {"pp": 2}, (X,), num_microbatches=2)


def test_no_microbatch_finds_what_another_left() -> None:
    """The new value is that of the last; what reads the old one has it in each."""
    joint = passed(Stepping(both_ways), (X,), InsertReshards)
    local = SeparateMicrobatches().apply(Lower().apply(joint))
    assert not check_local(local, joint)
    assert {output.name for output in local.signature.outputs_of("buffer") if output.is_once} == {"total", "other"}
    own = SeparateMicrobatches("own").apply(Lower().apply(joint))
    assert {output.name for output in own.signature.outputs_of("buffer") if output.is_once} == {"total", "other"}, "nothing is estimated"


def test_beside_statistics_of_microbatches_each_of_them_counts() -> None:
    class Normed(Stepping):
        def __init__(self) -> None:
            super().__init__(counted)
            self.norm = nn.BatchNorm1d(16)
            self.first = nn.Sequential(nn.Linear(8, 16), self.norm)

    model = Normed()
    compiled(model, {"pp": 2}, (X,), num_microbatches=2, microbatch_statistics="own")(X)
    assert (int(model.calls), int(model.norm.num_batches_tracked or 0)) == (5, 2)
