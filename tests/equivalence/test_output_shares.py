"""What a call on processes returns besides the loss is the rank's share along dp, also behind ops that go across samples; what has no
dim of samples is whole, of whatever size it is."""

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
from torch.distributed.tensor import DTensor

import autopar

SAMPLES = 8
ACROSS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda h: h.flip(0),
    "cumsum": lambda h: h.cumsum(0),
    "softmax": lambda h: h.softmax(0),
    "solve": lambda h: torch.linalg.solve(h @ h.T + torch.eye(len(h), dtype=h.dtype), h),
    "permuted": lambda h: h[torch.arange(len(h) - 1, -1, -1)],
}


class Model(nn.Module):
    """Of 8 samples and 8 features, so that sizes tell nothing."""

    def __init__(self, across: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.across = nn.Linear(8, 8), nn.Linear(8, 8), across

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.across(self.first(x))
        return self.last(h), h.mean(0)


def differences(name: str, samples: int) -> dict[str, Any]:
    """Of this rank's outputs, and of gradients of the mean over dp of the ranks' own losses, from those of the model itself."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = dist.get_rank() // 2
    torch.manual_seed(1)
    x, model, plain = torch.randn(samples, 8, dtype=torch.float64), Model(ACROSS[name]).double(), Model(ACROSS[name]).double()
    parallel = autopar.compile(model, mesh, backend="eager", timeout=180)
    mine = x.tensor_split(2)[place]
    with torch.no_grad():
        each, mean = parallel(mine)
    wanted, wanted_mean = plain(x)
    found = {"output": _apart(each, wanted.tensor_split(2)[place]), "mean": _apart(mean, wanted_mean)}
    if samples % 2 == 0:
        parallel(mine)[0].square().mean().backward()
        wanted.square().mean().backward()
        found["gradient"] = _gradients_apart(parallel, plain)
    return found


def _gradients_apart(parallel: nn.Module, plain: nn.Module) -> float:
    pairs = zip(parallel.parameters(), plain.parameters(), strict=True)
    return max(_apart(_whole(ours.grad), theirs.grad) for ours, theirs in pairs)


def _whole(gradient: Tensor | None) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def _apart(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None and ours.shape == theirs.shape, (ours.shape, theirs is not None and theirs.shape)
    return float((ours - theirs).abs().max().detach()) if ours.numel() else 0.0


@pytest.mark.parametrize("name", ACROSS)
def test_outputs_behind_ops_across_samples(gloo_ranks: Any, name: str) -> None:
    for found in gloo_ranks.run(differences, name, SAMPLES):
        assert max(found.values()) < 1e-9 and len(found) == 3, found


def test_unequal_shares(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(differences, "flip", 7):
        assert max(found.values()) < 1e-9, found


class Returns(nn.Module):
    """What `forward` makes of a linear layer's result."""

    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.returned = nn.Linear(8, 8, dtype=torch.float64), returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.linear(x))


def shared(h: Tensor) -> Tensor:
    """A rank's share of the whole."""
    return h.tensor_split(2)[dist.get_rank() // 2]


# What is returned, of an input of which shape, the samples along which dim; what of the whole results a rank has.
RETURNED: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], int, Callable[..., Any]]] = {
    # Dims longer than the batch behind an op across samples: which of their atoms the samples are, nobody says. Whole, but right.
    "positions of samples that are mixed": (lambda h: (h.softmax(1).reshape(-1, 8),), (4, 6, 8), 1, lambda h: (h,)),
    "views of samples that are mixed": (lambda h: (torch.cat([h.flip(0), 2 * h.flip(0)]),), (8, 8), 0, lambda h: (h,)),
    "beside one that is the batch": (
        lambda h: (h.transpose(0, 1), h.flip(0).transpose(0, 1).reshape(-1, 8)),
        (8, 4, 8),
        0,
        lambda h, mixed: (shared(h.transpose(0, 1)).transpose(0, 1), mixed),
    ),
    "a batch size in the code": (lambda h: (h[:, :6].reshape(8, -1),), (8, 8), 0, lambda h: (shared(h),)),
    "a batch size in the code, and as many features": (lambda h: (h.view(8, -1),), (8, 8), 0, lambda h: (h,)),
    "half a batch in the code": (lambda h: (h.view(8, -1),), (16, 8), 0, lambda h: (h,)),
    # Rows are pairs: of all first ones and then all second ones nobody has a share.
    "sides of pairs": (lambda h: (h.view(-1, 2, 8).transpose(0, 1).reshape(-1, 8),), (16, 8), 0, lambda h: (h,)),
    "pairs themselves": (lambda h: (h.view(-1, 2, 8).mean(1),), (16, 8), 0, lambda h: (shared(h),)),
    "columns that count samples": (lambda h: (h.cumsum(0) @ h.T,), (8, 8), 0, lambda h: (h,)),
    "labels of no input": (lambda h: (h, torch.arange(len(h)), torch.zeros(len(h), 3)), (8, 8), 0, lambda *each: (*map(shared, each),)),
    # The 4 walks with the samples, but counts none: whole.
    "places within groups": (lambda h: (h, h.view(-1, 4, 8).mean(0)), (16, 8), 0, lambda h, mean: (shared(h), mean)),
    "groups": (lambda h: (h.view(-1, 4, 8).cumsum(0),), (16, 8), 0, lambda h: (h,)),
    "pairs of samples": (lambda h: (h @ h.T,), (8, 8), 0, lambda h: (shared(h),)),
    "pairs, the other dim first": (lambda h: ((h @ h.T)[:, :4],), (8, 8), 0, lambda h: (shared(h),)),
    "halves of the batch": (lambda h: (h.flip(0), h.flip(0).view(-1, 4, 8).mean(0)), (8, 8), 0, lambda h, mean: (shared(h), mean)),
}


def returned_differences(name: str) -> list[float]:
    returned, shape, dim, wanted = RETURNED[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    parallel = autopar.compile(Returns(returned), mesh, backend="eager", timeout=180, batch_dims=dim)
    with torch.no_grad():
        found, whole = parallel(x.tensor_split(2, dim)[dist.get_rank() // 2]), Returns(returned)(x)
    return [_apart(ours.double(), theirs.double()) for ours, theirs in zip(found, wanted(*whole), strict=True)]


@pytest.mark.parametrize("name", RETURNED)
def test_outputs_whose_samples_nobody_can_tell_are_right(gloo_ranks: Any, name: str) -> None:
    for found in gloo_ranks.run(returned_differences, name):
        assert max(found) < 1e-9, found


class PairModel(nn.Module):
    """Weighs each pair of samples: both dims of `pairs` walk with the batch, one counts the samples of a rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        h = self.linear(x)
        return (h @ h.T * pairs.transpose(0, 1)).square().mean()


def pair_differences(dim: int) -> float:
    """Of the loss on `(2, 2)`, where each rank is given its share of the pairs along `dim`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    x, pairs = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    parallel = autopar.compile(PairModel(), mesh, backend="eager", timeout=180, batch_dims={"x": 0, "pairs": dim})
    place = dist.get_rank() // 2
    return _apart(parallel(x=x.tensor_split(2)[place], pairs=pairs.tensor_split(2, dim)[place]), PairModel()(x, pairs))


@pytest.mark.parametrize("dim", [0, 1])
def test_an_input_that_walks_twice_with_the_batch_is_shared_out_once(gloo_ranks: Any, dim: int) -> None:
    assert max(gloo_ranks.run(pair_differences, dim)) < 1e-12


# Of all samples h (with a feature that tells them apart): what a rank has is what the model makes of its own samples alone.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "two": lambda h: torch.cat([h, 2 * h]),
    "stacked": lambda h: torch.stack([h, 2 * h, 3 * h]).flatten(0, 1),
    "expanded": lambda h: h[None].expand(2, -1, -1).reshape(-1),
    "repeated": lambda h: h.repeat(2, 1),
    "each twice": lambda h: h.repeat_interleave(2, 0),
    "positions": lambda h: h.reshape(-1),
    "behind a dim of one": lambda h: h.unsqueeze(0),
}


def views_of_own_samples(name: str, samples: tuple[int, int]) -> list[float]:
    """Of the output, of gradients of the mean of the ranks' losses, and what `verify` finds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    x = torch.randn(sum(samples), 8, dtype=torch.float64)
    mine = x.split(samples)[dist.get_rank() // 2]
    parallel = autopar.compile(Returns(VIEWS[name]), mesh, backend="eager", timeout=180)
    plain = Returns(VIEWS[name])
    found, wanted = parallel(mine), plain(mine)
    found.square().sum().backward()
    (sum(plain(each).square().sum() for each in x.split(samples)) / 2).backward()
    return [_apart(found, wanted), _gradients_apart(parallel, plain), parallel.verify(mine, promote=True).worst]


@pytest.mark.parametrize("samples", [(4, 4), (5, 3), (4, 3), (1, 0)])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_samples_are_shared_out_view_by_view(gloo_ranks: Any, name: str, samples: tuple[int, int]) -> None:
    for found in gloo_ranks.run(views_of_own_samples, name, samples):
        assert max(found) < 1e-9, found


class Both(nn.Module):
    """As many features as samples: a dim tells nothing by its length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        return {"loss": h.square().mean(), "p": h.softmax(0), "flat": h.reshape(-1)}


def beside_positions() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    x, place = torch.randn(8, 6, dtype=torch.float64), dist.get_rank() // 2
    parallel, plain = autopar.compile(Both(), mesh, backend="eager", timeout=180, outputs="all"), Both()
    found, wanted = parallel(x.split((5, 3))[place]), plain(x)
    found["loss"].backward()
    wanted["loss"].backward()
    shares = {"p": wanted["p"].split((5, 3))[place], "flat": wanted["flat"].split((40, 24))[place]}
    return max(_gradients_apart(parallel, plain), *(_apart(found[name], share) for name, share in shares.items()))


def test_an_output_of_all_positions_leaves_the_dims_of_others_alone(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(beside_positions)) < 1e-9


def halves_of_pairs() -> list[float]:
    """Of the means of pairs, one of which lies on both sides of a share's end, and of gradients of the mean of the ranks' losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    model, plain = (Returns(lambda h: h.view(-1, 2, 8).mean(1)) for _ in range(2))
    parallel = autopar.compile(model, mesh, backend="eager", timeout=180)
    found, wanted = parallel(x.split((5, 3))[dist.get_rank() // 2]), plain(x)
    found.square().sum().backward()
    wanted.square().sum().backward()
    return [_apart(found, wanted), _gradients_apart(parallel, plain)]


def test_pairs_that_no_rank_has_whole_are_whole_on_all(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(halves_of_pairs):
        assert max(found) < 1e-9, found


def losses_of_unequal_shares() -> tuple[list[float], list[str]]:
    """Gradients of each rank's mean over its samples, from those of the mean of both, and by shares of samples from the global mean's."""
    torch.manual_seed(0)
    x, plain = torch.randn(9, 8, dtype=torch.float64), nn.Linear(8, 3).double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = x.tensor_split(2)[dist.get_rank() // 2]
    parallel = autopar.compile(copy.deepcopy(plain), mesh, backend="eager", timeout=180)
    found, messages = list[float](), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("autopar").addHandler(handler)
    halves = torch.stack([half.square().mean() for half in plain(x).tensor_split(2)])
    for factor, wanted in ((1.0, halves.mean()), (len(mine) * 2 / 9, plain(x).square().mean())):
        for each in (parallel, plain):
            each.zero_grad()
        (parallel(mine).square().mean() * factor).backward()
        wanted.backward(retain_graph=True)
        found.append(_gradients_apart(parallel, plain))
    return found, [message for message in messages if "gives no loss" in message]


def test_unequal_shares_count_the_same_and_are_told(gloo_ranks: Any) -> None:
    found = gloo_ranks.run(losses_of_unequal_shares)
    assert max(error for apart, _ in found for error in apart) < 1e-12
    ((text,), *others) = (messages for _, messages in found)
    assert not any(others)
    assert "ranks along dp pass 5, 4 samples" in text and "multiply each rank's mean by its samples * 2 / 9" in text
