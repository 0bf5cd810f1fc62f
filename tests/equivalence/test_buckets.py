"""Gradients that were reduced in buckets, on real ranks: each has memory of its own, whatever the user does with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.ir.instructions import Launch
from autopar.runtime.execute.world import local_of

# ---- on the ranks


class Shifted(nn.Module):
    """The gradient of `short` is a part of that of `long`; `twin` has the same gradient as `long`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.long, self.twin, self.short = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.long + self.twin + F.pad(self.short, (1, 0))).square().sum()


def trained() -> dict[str, Any]:
    batch, model, plain = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), Shifted(), Shifted()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mine = batch.chunk(4)[mesh.get_rank()]
    parallel = autopar.compile(model, mesh, example_inputs=(mine,), backend="eager", timeout=60)
    launches = [each for each in parallel.compiled.schedules[0].instructions if isinstance(each, Launch)]
    found: dict[str, Any] = {"joined": max(len(each.sources) for each in launches)}

    def step() -> None:
        parallel(mine).backward()
        plain(batch).backward()

    def error() -> float:
        pairs = zip(parallel.named_parameters(), plain.parameters(), strict=True)
        return max(float((local_of(ours.grad) - theirs.grad).abs().max()) for (_, ours), theirs in pairs)

    step()
    found["first"] = error()
    spans = sorted((part.data_ptr(), part.data_ptr() + part.nbytes) for part in (local_of(p.grad) for p in parallel.parameters()))
    found["overlaps"] = sum(end > begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    step()
    found["added up"] = error()
    kept = local_of(dict(parallel.named_parameters())["long"].grad)
    before = kept.clone()
    for module in (parallel, plain):
        for parameter in module.parameters():
            parameter.grad = None
    step()
    found["after None"], found["kept"] = error(), float((kept - before).abs().max())
    for module in (parallel, plain):
        dict(module.named_parameters())["short"].grad = None
        dict(module.named_parameters())["twin"].grad.mul_(0.5)
    step()
    found["one at a time"] = error()
    return found


# ---- the test


def test_gradients_of_buckets_can_be_kept_added_up_and_dropped_one_by_one(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(trained):
        assert found.pop("joined") > 1, "nothing was joined"
        assert found.pop("overlaps") == 0
        assert max(found.values()) <= 1e-5, found
