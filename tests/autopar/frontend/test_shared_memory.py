"""Tensors of a model that lie in one memory: refused where one would not see what is written into the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError, MeshError
from autopar.frontend.shared_memory import overlap, refuse_shared_parameters

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """What `share` makes of the buffer `count` is the buffer `seen`, which forward reads after it wrote into `count`."""

    def __init__(self, share: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.arange(6.0))
        self.count: Tensor
        self.register_buffer("seen", share(self.count))
        self.kept = share(self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return (self.linear(x) * self.seen.sum()).square().mean()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda count: count[:3],
    "another shape": lambda count: count.view(2, -1),
    "the same elements": lambda count: count.detach(),
    "every other": lambda count: count[::2],
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_buffer_that_shows_what_forward_writes_is_refused(name: str) -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)writes into the buffer 'count', and the buffer 'seen'.*where: .*self\.count\.add_\(1\)"
    ) as error:
        autopar.compile(Model(VIEWS[name]), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    assert "how to mend it" in str(error.value)


def test_a_tensor_beside_the_buffers_is_refused_too() -> None:
    class Beside(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return (self.linear(x) * self.shown.sum()).square().mean()

    model = Beside(torch.clone)
    model.shown = model.count[1:]
    with pytest.raises(CaptureError, match=r"the buffer 'count', and the constant '.*shown'"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)], ids=["batch", "instance"])
def test_statistics_that_a_norm_tracks_are_written_too(norm: nn.Module) -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), norm
            self.register_buffer("seen", norm.get_buffer("running_mean")[:3])
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x).mT).square().mean() * self.seen.sum()

    x = torch.randn(4, 5, 6)
    with pytest.raises(CaptureError, match=r"writes into the buffer 'norm\.running_mean', and the buffer 'seen'"):
        autopar.compile(Shown(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    autopar.compile(Shown().eval(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")


def test_memory_of_ones_own_and_one_buffer_of_two_names_are_taken() -> None:
    for share in (torch.clone, lambda count: count):
        model, reference = Model(share), Model(share)
        reference.load_state_dict(model.state_dict())
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
        for _ in range(2):
            torch.testing.assert_close(parallel(X), reference(X))


def test_overlap_is_of_elements() -> None:
    table = torch.zeros(4, 6)
    assert overlap(table, table[1]) and overlap(table[:, 2:], table[3:]) and overlap(table.t(), table.view(torch.int32))
    assert overlap(table[:1].expand(3, 6), table[0, 5:])
    assert not overlap(table, table) and not overlap(table, torch.zeros(4, 6)) and not overlap(table[:0], table)
    assert not overlap(table[:, :3], table[:, 3:]) and not overlap(table[::2], table[1::2]) and not overlap(table[:2], table[2:])
    sparse = table.to_sparse()
    assert not overlap(sparse, table) and not overlap(table, sparse)
    meta = torch.zeros(4, 6, device="meta")
    assert overlap(meta, meta[1:]) and not overlap(meta[:2], meta[2:])


def test_processes_refuse_what_a_parameter_shares() -> None:
    model = Model(torch.clone)
    refuse_shared_parameters(model, {"sparse": torch.eye(3).to_sparse()})
    with pytest.raises(MeshError, match="'linear.weight' and 'kept' lie in the same memory"):
        refuse_shared_parameters(model, {"kept": model.linear.weight.detach()[0]})
    model.linear.weight.requires_grad_(False)
    refuse_shared_parameters(model, {"kept": model.linear.weight.detach()[0]})
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    refuse_shared_parameters(tied, {})
    tied[1].weight = nn.Parameter(tied[0].weight.data)
    with pytest.raises(MeshError, match=r"head\.weight = embedding\.weight"):
        refuse_shared_parameters(tied, {})
