"""Buffers that a forward changes: counts and running means are as one device has them, and what would be lost is refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import CaptureError, MicrobatchError


class Counts(nn.Module):
    """Two layers; what the first one's activations do to the buffers is `update(module, activations)`."""

    def __init__(self, update: Callable[[Counts, Tensor], None]) -> None:
        super().__init__()
        self.first, self.last, self.update = nn.Linear(8, 16), nn.Linear(16, 8), update
        self.register_buffer("count", torch.zeros(16))
        self.register_buffer("mean", torch.ones(16))
        self.count: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        self.update(self, h)
        return ((self.last(h) * self.mean.mean()) ** 2).mean()


def counted(module: Counts, h: Tensor) -> None:
    """As mixture-of-experts models count the tokens of each expert."""
    with torch.no_grad():
        module.count += (h > 0.1).to(torch.float32).sum(0)


def in_two_terms(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        module.count.sub_((h > 0.1).to(torch.float32).sum(0))
        module.count.copy_((h > 0.2).to(torch.float32).mean(0) + module.count)


def turned(module: Counts, h: Tensor) -> None:
    """Each microbatch would turn what the one before had turned."""
    with torch.no_grad():
        module.count.copy_(module.count.view(4, 4).t().reshape(16) + (h > 0.1).to(torch.float32).sum(0))


def squared(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        count = (h > 0.1).to(torch.float32).sum(0)
        module.count += count * count


def replaced(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        module.mean.copy_(h.mean(0))


def largest(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        module.mean.copy_(torch.maximum(module.mean, h.amax(0)))


def averaged(module: Counts, h: Tensor) -> None:
    """In place, under no_grad, of a value that has a gradient outside."""
    with torch.no_grad():
        module.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)


def copied(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        module.mean.copy_(module.mean * 0.9 + h.mean(0) * 0.1)


def detached(module: Counts, h: Tensor) -> None:
    module.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)


def assigned(module: Counts, h: Tensor) -> None:
    with torch.no_grad():
        module.mean = module.mean * 0.9 + h.mean(0) * 0.1


def assigned_unread(module: Counts, h: Tensor) -> None:
    module.count = h.detach().sum(0)


def assigned_both(module: Counts, h: Tensor) -> None:
    """Each takes what the other had, and a write to the new one follows."""
    with torch.no_grad():
        module.count, module.mean = module.mean * 2, module.count + h.mean(0)
        module.mean.mul_(0.5)


def assigned_with_a_gradient(module: Counts, h: Tensor) -> None:
    module.mean = module.mean * 0.9 + h.mean(0) * 0.1


def assigned_in_double(module: Counts, h: Tensor) -> None:
    module.mean = module.mean.double() + h.detach().mean(0)


def assigned_as_another(module: Counts, h: Tensor) -> None:
    """What is written into one afterwards shows in the other."""
    module.count = module.mean = module.mean + h.detach().mean(0)


def unread_in_double(module: Counts, h: Tensor) -> None:
    module.count = h.detach().sum(0).double()


def unread_of_another(module: Counts, h: Tensor) -> None:
    module.count = module.mean


def written_with_a_gradient(module: Counts, h: Tensor) -> None:
    module.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)


def by_data(module: Counts, h: Tensor) -> None:
    """As codebooks are moved (VQ-VAE-2, EnCodec)."""
    module.mean.data.mul_(0.9).add_(h.mean(0), alpha=0.1)
    module.count.data.copy_(module.mean * 2)


def a_part_by_data(module: Counts, h: Tensor) -> None:
    module.mean.data[:4] = h.mean(0)[:4]


def by_data_that_is_read(module: Counts, h: Tensor) -> None:
    """What is read has a gradient, by way of what was written."""
    data = module.mean.data
    data.add_(h.mean(0))
    module.count.add_(data)


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def both(update: Callable[[Counts, Tensor], None]) -> tuple[Counts, Counts]:
    torch.manual_seed(0)
    model = Counts(update)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(
    ("update", "mesh", "number"),
    [
        (counted, {"dp": 2, "tp": 2}, 1),
        (counted, {"dp": 2}, 4),
        (counted, {"pp": 2, "dp": 2}, 4),
        (in_two_terms, {"dp": 2, "tp": 2}, 2),
        (averaged, {"dp": 2, "tp": 2}, 1),
        (copied, {"dp": 2}, 1),
        (assigned, {"dp": 2}, 1),
        (assigned, {"tp": 2}, 1),
        (assigned, {"pp": 2}, 1),
        (by_data, {"dp": 2}, 1),
        (by_data, {"tp": 2}, 1),
        (a_part_by_data, {"dp": 2}, 1),
        (assigned_unread, {"dp": 2}, 1),
        (assigned_both, {"dp": 2, "tp": 2}, 1),
        (detached, {"tp": 2}, 1),
    ],
)
def test_buffers_are_as_on_one_device(update: Callable[[Counts, Tensor], None], mesh: dict[str, int], number: int) -> None:
    model, reference = both(update)
    parallel = autopar.compile(model, autopar.virtual_mesh(**mesh), example_inputs=(X,), backend="eager", num_microbatches=number)
    for _ in range(2):
        for module in (parallel, reference):
            module.zero_grad()
            module(X).backward()
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))
        for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert reference.count.any() or not torch.equal(reference.mean, torch.ones(16)), "something changed"
    assert parallel.verify(X)


@pytest.mark.parametrize("update", [squared, turned, replaced, largest, averaged, assigned, by_data])
def test_what_microbatches_change_one_after_another_is_said(
    update: Callable[[Counts, Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes its own values for the whole batch's: sums of its own times their number."""
    model, reference = both(update)
    options = {"backend": "eager", "num_microbatches": 4}
    with pytest.raises(MicrobatchError, match="num_microbatches=4 would change what the model computes"):
        autopar.compile(model, autopar.virtual_mesh(dp=1), example_inputs=(X,), **options)
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=1), example_inputs=(X,), microbatch_statistics="own", **options)
    assert "microbatches" in caplog.text
    parallel(X)
    if update not in (squared, turned):
        for part in X.chunk(4):
            reference(part)
        torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_a_count_of_the_inputs_is_taken_once(caplog: pytest.LogCaptureFixture) -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.seen += (x > 0).to(torch.float32).sum(0)
            return self.linear(x).square().mean()

    model = Seen()
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager", num_microbatches=4)
    parallel(X)
    assert torch.equal(model.seen, (X > 0).to(torch.float32).sum(0)) and not caplog.text


def test_buffers_of_a_module_under_two_names() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.same = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.same(torch.tanh(self.norm(self.linear(x)))).square().mean()

    torch.manual_seed(0)
    model = Twice()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    for module in (parallel, reference):
        module(X).backward()
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_a_count_is_no_estimate_and_a_running_mean_is_one(caplog: pytest.LogCaptureFixture) -> None:
    for update, warns in ((counted, False), (averaged, True)):
        options = {"backend": "eager", "num_microbatches": 4} | ({"microbatch_statistics": "own"} if warns else {})
        caplog.clear()
        with caplog.at_level(logging.WARNING, "autopar"):
            autopar.compile(both(update)[0], autopar.virtual_mesh(dp=2), example_inputs=(X,), **options)
        assert ("mix microbatches" in caplog.text) == warns, caplog.text


@pytest.mark.parametrize(
    ("update", "match"),
    [
        (
            assigned_with_a_gradient,
            r"a new tensor to the buffer 'mean' \(it has a gradient\), which it also reads.*self\.mean\.copy_\(\.\.\.\)",
        ),
        (assigned_in_double, r"'mean' \(it is \(16,\) of torch\.float64 on cpu, the buffer is \(16,\) of torch\.float32 on cpu\)"),
        (assigned_as_another, r"'mean' \(it lies in the memory of another tensor that the model has or is given\)"),
        (by_data_that_is_read, r"writes a value that has a gradient into its buffer"),
        (written_with_a_gradient, r"writes a value that has a gradient into its buffer 'mean'(?s:.*)x\.detach\(\)"),
    ],
)
def test_what_would_be_lost_is_refused(update: Callable[[Counts, Tensor], None], match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        autopar.compile(both(update)[0], autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


@pytest.mark.parametrize("update", [unread_in_double, unread_of_another])
def test_another_tensor_for_a_buffer_that_nobody_reads_is_a_warning(
    update: Callable[[Counts, Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        autopar.compile(both(update)[0], autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    assert "assigns a new tensor to the buffer 'count', which stays as it is" in caplog.text


class Centred(nn.Module):
    """As DINO's loss has its center; the backward, and whoever gets it returned, need what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.register_buffer("center", torch.ones(1, 16))
        self.center: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, old = self.linear(x), self.center
        loss = ((h - self.center) * h * self.center).square().mean()
        with torch.no_grad():
            self.center = self.center * 0.9 + h.mean(0, keepdim=True) * 0.1
        return loss, old


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}])
def test_the_old_values_of_an_assigned_buffer_are_kept_for_who_needs_them(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Centred()
    reference, buffer = copy.deepcopy(model), model.center
    parallel = autopar.compile(model, autopar.virtual_mesh(**mesh), example_inputs=(X,), backend="eager", outputs="all")
    kept = []
    for _ in range(2):
        for module in (parallel, reference):
            module.zero_grad()
            loss, old = module(X)
            loss.backward()
            kept.append(old)
        torch.testing.assert_close(model.center, reference.center)
        torch.testing.assert_close(model.linear.weight.grad, reference.linear.weight.grad)
    torch.testing.assert_close(kept[::2], kept[1::2])
    assert model.center is buffer


def test_a_buffer_that_something_else_holds_is_not_assigned_in_place() -> None:
    model = Centred()
    model.first = model.center
    with pytest.raises(CaptureError, match=r"'center' \('first' lies in the same memory, and would keep the old values\)"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


def counted_on_real_ranks() -> tuple[Tensor, Tensor, bool]:
    """What a gloo rank runs: the buffer after two microbatches a rank, what one device has, and whether verify agrees."""
    model, reference = both(counted)
    mesh, share = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), X.chunk(2)[dist.get_rank() // 2]
    options: dict[str, Any] = {"cluster": autopar.Cluster.ideal(), "num_microbatches": 2, "timeout": 180}
    parallel = autopar.compile(model, mesh, example_inputs=(share,), backend="eager", **options)
    parallel(share).backward()
    reference(X)
    return parallel.full_state_dict()["count"], reference.count, bool(parallel.verify(share))


def test_counts_on_real_ranks(gloo_ranks: Any) -> None:
    for ours, theirs, agrees in gloo_ranks.run(counted_on_real_ranks):
        assert torch.equal(ours, theirs) and agrees


class Unread(nn.Module):
    """Norms whose results nobody reads, as where an earlier feature is trained on: their statistics move all the same."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch, self.instance = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(2, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.batch(h), self.instance(h.view(-1, 2, 2))
        torch.native_batch_norm(h, None, None, self.mean, self.variance, True, 0.1, 1e-5)
        return h.square().mean()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_statistics_of_norms_that_nobody_reads_move(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Unread().double(), torch.randn(8, 4, dtype=torch.float64)
    original = copy.deepcopy(model)
    original(x)
    parallel = autopar.compile(model, autopar.virtual_mesh(**mesh), example_inputs={"x": x}, backend="eager")
    assert parallel.verify(x=x)
    parallel(x=x).backward()
    for name, wanted in original.named_buffers():
        torch.testing.assert_close(parallel.full_state_dict()[name], wanted)
