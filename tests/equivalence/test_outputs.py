"""What a model may return, and where gradients come back from: the same parameters get the same gradients as in eager, None included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.mesh import virtual_mesh

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Returning(nn.Module):
    def __init__(self, returned: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.frozen = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.table, self.scale, self.shift = (nn.Parameter(torch.randn(*size, dtype=torch.float64)) for size in ((8, 8), (8,), (4, 8)))
        self.count = nn.Buffer(torch.ones(8, dtype=torch.float64))
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self, self.down(torch.relu(self.up(x))), x)


RETURNED: dict[str, Callable[..., Any]] = {
    "a parameter": lambda self, y, x: (y, self.table),
    "a parameter alone": lambda self, y, x: (self.table,),
    "a parameter whose gradient is what arrives": lambda self, y, x: (x + self.shift,),
    "a parameter twice": lambda self, y, x: (y, self.table, self.table),
    "a parameter that y reads too": lambda self, y, x: (y @ self.table, self.table),
    "a view of a parameter": lambda self, y, x: (y @ self.table, self.table.t()[:2]),
    "a parameter expanded": lambda self, y, x: (y, self.scale.expand(4, 8)),
    "a parameter rounded": lambda self, y, x: (y, self.table.floor()),
    "two heads": lambda self, y, x: (y, x * self.scale),
    "a frozen parameter": lambda self, y, x: (y, self.frozen.weight),
    "a detached parameter": lambda self, y, x: (y, self.table.detach()),
    "a buffer": lambda self, y, x: (y, self.count),
    "an input": lambda self, y, x: (y, x.view(-1)),
    "an output twice": lambda self, y, x: (y, y),
    "views of an output": lambda self, y, x: (y, y.view(-1), y[:, 0].expand(3, 4)),
    "chunks": lambda self, y, x: (*y.chunk(2, 1), y.sum()),
    "a view of the loss": lambda self, y, x: {"loss": (loss := y.square().mean()), "same": loss.view(1)},
}


def compare(returned: Callable[..., Any], chosen: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Gradients of some of the outputs, on the mesh and by the model alone."""
    torch.manual_seed(0)
    model = Returning(returned)
    plain = copy.deepcopy(model)
    parallel = autopar.compile(model, virtual_mesh(dp=2, tp=2), example_inputs=(X,), backend="eager", outputs="all")
    for module in (plain, parallel):
        results = module(X)
        outputs = chosen([each for each in (results.values() if isinstance(results, dict) else results) if each.requires_grad])
        sum((each * torch.linspace(1, 2, each.numel()).view(each.shape)).sum() for each in outputs).backward()
    wanted, found = ({name: each.grad for name, each in module.named_parameters()} for module in (plain, parallel))
    assert {name for name, each in found.items() if each is None} == {name for name, each in wanted.items() if each is None}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", RETURNED)
def test_gradients_come_back_through_all_that_is_returned(kind: str) -> None:
    compare(RETURNED[kind], lambda outputs: outputs)


@pytest.mark.parametrize("kind", [kind for kind in RETURNED if kind not in ("a parameter alone", "an output twice")])
def test_what_the_backward_does_not_reach_has_no_gradient(kind: str) -> None:
    """Zeros instead of None would let an optimizer decay what nothing trains."""
    compare(RETURNED[kind], lambda outputs: outputs[-1:])
    compare(RETURNED[kind], lambda outputs: outputs[:1])


def on_a_rank() -> tuple[list[str], float, bool]:
    """Rank 0 needs the first head alone, the others both: names without a gradient, the error of the second head's, and whether a backward
    from the first head alone leaves it None."""
    torch.manual_seed(0)
    model = Returning(RETURNED["two heads"])
    plain = copy.deepcopy(model)
    mesh, rank = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), dist.get_rank()
    parallel = autopar.compile(model, mesh, example_inputs=(X[rank : rank + 1],), backend="eager", timeout=60)
    first, second = parallel(X[rank : rank + 1])
    (first.sum() + second.sum() if rank else first.sum()).backward()
    plain(X)[1][1:].sum().div(4).backward()
    missing = [name for name, each in parallel.named_parameters() if each.requires_grad and each.grad is None]
    error = float((parallel.scale.grad.to_local() - plain.scale.grad).abs().max())
    parallel.zero_grad()
    parallel(X[rank : rank + 1])[0].sum().backward()
    return missing, error, parallel.scale.grad is None


def test_ranks_agree_on_what_has_no_gradient(gloo_ranks: Any) -> None:
    for missing, error, is_none in gloo_ranks.run(on_a_rank):
        assert set(missing) == {"table", "shift"} and error < 1e-12 and is_none
