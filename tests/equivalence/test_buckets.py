"""Buckets on real ranks: what comes out, in which order they are launched, and gradients that the user touches one by one."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.ir.instructions import Instruction, Launch, Receive, Send
from autopar.ir.mesh import Mesh
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.runtime.execute.distributed import DistributedTransport
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.execute.virtual import collect
from autopar.runtime.execute.world import local_of
from tests.support.buckets import random_buckets
from tests.support.models.zoo import ZOO

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


def touched() -> dict[str, float]:
    """The largest error of a gradient, where hooks change some, drop one, and others are zeroed in place."""
    batch, model, plain = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double(), Shifted().double(), Shifted().double()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    mine = batch.chunk(4)[mesh.get_rank()]
    parallel = autopar.compile(model, mesh, example_inputs=(mine,), backend="eager", timeout=60)
    named = [dict(parallel.named_parameters()), dict(plain.named_parameters())]
    found: dict[str, float] = {}

    def step() -> float:
        parallel(mine).backward()
        plain(batch).backward()
        pairs = [(ours.grad, theirs.grad) for ours, theirs in zip(named[0].values(), named[1].values(), strict=True)]
        assert all((one is None) == (other is None) for one, other in pairs)
        return max(float((local_of(one) - other).abs().max()) for one, other in pairs if one is not None)

    handles = [each["long"].register_hook(lambda gradient: 3 * gradient) for each in named]
    found["hook"] = step()
    found["hook, added up"] = step()
    for handle in handles:
        handle.remove()
    handles = [each["twin"].register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", None)) for each in named]
    found["dropped by a hook"] = step()
    for handle in handles:
        handle.remove()
    for set_to_none in (False, True, False):
        for module in (parallel, plain):
            torch.optim.SGD(module.parameters(), lr=0.1).zero_grad(set_to_none=set_to_none)
        found[f"zeroed, {set_to_none}, {len(found)}"] = step()
    for each in named:
        each["layer.weight"].grad = torch.ones_like(each["layer.weight"])
    found["another in its place"] = step()
    for each in named:
        each["short"].requires_grad_(False)
        each["short"].grad = None
    found["frozen"] = step()
    return found


def collectives_agree(seed: int) -> list[str]:
    """Where several at once bring something else than virtual ranks say of each."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    groups = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=60)
    axes_sets: list[tuple[str, ...]] = [("dp",), ("dp", "tp"), ("tp", "dp")]
    groups.create(mesh, axes_sets)
    transport, wrong = DistributedTransport(groups, mesh), list[str]()
    kinds = [("all_reduce", "sum"), ("all_reduce", "max"), ("all_gather", "copy"), ("reduce_scatter", "sum")]
    for (collective, kind), axes, dtype in itertools.product(kinds, axes_sets, (torch.float32, torch.bfloat16, torch.int64)):
        members = mesh.group(groups.rank, axes)
        shapes = [(3, 2), (), (5,), (1, 17, 2)]
        if collective == "reduce_scatter":
            shapes = [(len(members), *shape) for shape in shapes]

        def brought(rank: int, shapes: list[tuple[int, ...]] = shapes, dtype: torch.dtype = dtype) -> list[Tensor]:
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in shapes]

        names = [f"x{number}" for number in range(len(shapes))]
        launch = Launch(collective, kind, axes, tuple(names), tuple(f"{name}_1" for name in names))  # type: ignore[arg-type]
        for _ in range(2):  # the memory is used again
            found = transport.wait(transport.launch(launch, brought(groups.rank)))
            parts = zip(*(brought(rank) for rank in members), strict=True)
            wanted = [collect(launch, each)[members.index(groups.rank)] for each in parts]
            same = all(torch.equal(one, other) and one.is_contiguous() for one, other in zip(found, wanted, strict=True))
            wrong += [] if same else [f"{launch} of {dtype}"]
    return wrong


# How ranks agree on the gradient of their mean loss; no part of the schedule.
TANGENT = "LAUNCH all_reduce sum dp (tangent) -> tangent"


def launched(backend: str, axes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """What this rank launches in a step, what its schedule says, and how far gradients are from the plain model's."""
    torch.manual_seed(0)
    case, plain = (ZOO["gpt2"](axes.get("pp", 1)) for _ in range(2))
    plain.model.load_state_dict(case.model.state_dict())
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    mine = {key: value.chunk(axes["dp"])[mesh.get_local_rank("dp")] for key, value in case.batch.items()}
    parallel = autopar.compile(case.model, mesh, example_inputs=mine, backend=backend, cluster="cpu", timeout=200, **options)
    found: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(DistributedTransport, name)

        def method(self: DistributedTransport, instruction: Instruction, *operands: Any) -> Any:
            if str(instruction) != TANGENT:
                found.append(str(instruction))
            return original(self, instruction, *operands)

        return patch.object(DistributedTransport, name, method)

    with noted("launch"), noted("send"), noted("receive"):
        loss = parallel(**mine).loss
        loss.backward()
    expected = plain.model(**plain.batch).loss
    expected.backward()
    gradients = {name: each.grad for name, each in plain.model.named_parameters()}
    ours = {name: each.grad for name, each in parallel.named_parameters() if each.grad is not None}
    errors = [float((each.full_tensor() - gradients[name]).abs().max()) for name, each in ours.items()]
    schedule = parallel.compiled.schedule_of(dist.get_rank())
    said = [str(each) for each in schedule.instructions if isinstance(each, (Launch, Send, Receive))]
    joined = [each for each in schedule.instructions if isinstance(each, Launch) and len(each.sources) > 1]
    return {"launched": found, "said": said, "kinds": {each.collective for each in joined}, "error": max(errors)}


def bucketed_at_random(seed: int) -> dict[str, Any]:
    """A step in buckets drawn at random: like `launched`."""
    original = BucketCollectives.apply

    def apply(self: BucketCollectives, program: Any, decision: Any) -> Any:
        return original(self, program, random_buckets(program, seed))

    with patch.object(BucketCollectives, "apply", apply):
        return launched("eager", {"dp": 2, "tp": 2}, {"num_microbatches": 1 + seed % 2})


# ---- the tests


def test_gradients_of_buckets_can_be_kept_added_up_and_dropped_one_by_one(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(trained):
        assert found.pop("joined") > 1, "nothing was joined"
        assert found.pop("overlaps") == 0
        assert max(found.values()) <= 1e-5, found


def test_gradients_of_buckets_are_right_where_hooks_and_loops_touch_one_of_them(gloo_ranks: Any) -> None:
    for found in gloo_ranks.run(touched):
        assert len(found) == 8 and max(found.values()) <= 1e-12, found


def test_several_at_once_bring_what_each_would_bring(gloo_ranks: Any) -> None:
    for seed in range(2):
        assert gloo_ranks.run(collectives_agree, seed) == [[]] * 4


# The model casts to float32 inside.
ROUNDING = 1e-7
PIPELINE = {"dp": 2, "pp": 2}
SHARDED = {"zero": 3}


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_collectives_are_launched_as_scheduled_and_in_one_order_on_all_ranks(gloo_ranks: Any, backend: str) -> None:
    found = gloo_ranks.run(launched, backend, PIPELINE, {"num_microbatches": 2})
    for rank in found:
        assert rank["launched"] == rank["said"] != [] and rank["kinds"] == {"all_reduce"}
        assert rank["error"] <= ROUNDING, rank["error"]
    for place in range(2):  # ranks are dp major, pp minor
        assert found[place]["launched"] == found[place + 2]["launched"]


def test_parameters_split_over_dp_are_gathered_and_reduced_in_buckets(gloo_ranks: Any) -> None:
    for rank in gloo_ranks.run(launched, "eager", {"dp": 4}, SHARDED):
        assert rank["launched"] == rank["said"]
        assert rank["kinds"] >= {"all_gather", "reduce_scatter"}, rank["kinds"]
        assert rank["error"] <= ROUNDING, rank["error"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_random_buckets_are_exact_on_processes(gloo_ranks: Any, seed: int) -> None:
    found = gloo_ranks.run(bucketed_at_random, seed)
    for rank in found:
        assert rank["launched"] == rank["said"] == found[0]["launched"]
        assert rank["kinds"] == {"all_reduce"} and rank["error"] <= ROUNDING, rank["error"]
