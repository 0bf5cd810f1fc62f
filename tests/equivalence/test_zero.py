"""ZeRO: the model stays exact, parameters lie in parts over dp, and levels differ in when they are gathered and gradients are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar import MeshError, MixedPrecision, ParallelModule, Plan, PlanError, ZeRO
from autopar.errors import AutoparError
from autopar.ir.instructions import Add, Launch
from autopar.ir.schedule import Schedule
from autopar.runtime.execute.world import local_of
from autopar.runtime.verify.report import error_of
from tests.support.captures import compiled
from tests.support.models import vision, zoo
from tests.support.models.zoo import Case
from tests.support.ranks import GlooRanks, share

MODELS: dict[str, Callable[..., Case]] = {"gpt2": zoo.gpt2, "llama": zoo.llama, "resnet": vision.resnet}
MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "dp2×tp2": {"dp": 2, "tp": 2},
    "pp2×dp2": {"pp": 2, "dp": 2},
    "pp2×dp2×tp2": {"pp": 2, "dp": 2, "tp": 2},
}
LEVELS = (1, 2, 3)
QUICK = {("llama", "dp2×tp2", 3), ("gpt2", "pp2×dp2", 2), ("resnet", "dp2", 3)}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0]}, {case[1]}, level {case[2]}")
    for case in product(MODELS, MESHES, LEVELS)
]


def case_of(name: str, mesh: dict[str, int] | None = None) -> Case:
    """With dropout, where a model has it."""
    return MODELS[name](2 if mesh and "pp" in mesh else 1, 0.1)


def parallel_of(name: str, mesh: dict[str, int], zero: Any, **options: Any) -> tuple[ParallelModule, zoo.Batch]:
    case = case_of(name, mesh)
    return compiled(case.model, mesh, case.batch, zero=zero, **options), case.batch


def launches(schedule: Schedule, collective: str) -> list[Launch]:
    return [
        each for each in schedule.instructions if isinstance(each, Launch) and each.collective == collective and each.axes[0][:2] == "dp"
    ]


@pytest.mark.parametrize(("name", "mesh", "level"), CASES)
def test_loss_and_gradients_are_the_originals(name: str, mesh: str, level: int) -> None:
    parallel, batch = parallel_of(name, MESHES[mesh], level)
    report = parallel.verify(promote=True, **batch)
    assert report and report.worst <= 1e-9, str(report)
    assert set(report.gradient_errors) == dict(parallel.named_parameters()).keys()
    whole = [each for each, placed in parallel.plan.parameters.items() if "dp" not in placed.sharding.axes]
    assert not whole, f"{whole} do not lie in parts"
    assert f"zero={level}" in parallel.explain(detail="all")
    if "tp" in MESHES[mesh]:
        assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()


# ---- what levels differ in


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def plain(mesh: dict[str, int], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, int], tuple[Tensor]]:
    torch.manual_seed(0)
    return Plain().to(dtype), mesh, (torch.randn(8, 8, dtype=dtype),)


def num_buffers(schedule: Schedule, collective: str) -> int:
    return sum(len(each.targets) for each in launches(schedule, collective))


def test_levels_differ_in_when_they_gather_and_when_they_cut() -> None:
    """Two microbatches: whole copies are gathered once, or each parameter for every forward and backward; sums are whole, or parts."""
    found = {level: schedule_in_microbatches(level) for level in LEVELS}
    number = len(found[3].signature.inputs_of("parameter"))
    gathers, cuts = ({level: num_buffers(each, kind) for level, each in found.items()} for kind in ("all_gather", "reduce_scatter"))
    assert gathers[1] == gathers[2] == number
    assert gathers[3] == 2 * (number + 1), "for each microbatch, and the second weight for the backward, too"
    assert cuts == {1: number, 2: 2 * number, 3: 2 * number}
    sums = {level: sum(each.bytes_of(name) for name in {add.target for add in each.instructions if isinstance(add, Add)})
            for level, each in found.items()}  # fmt: skip
    assert sums[2] == sums[3] < 0.51 * sums[1]


def schedule_in_microbatches(zero: Any) -> Schedule:
    (schedule,) = compiled(*plain({"dp": 2}), zero=zero, num_microbatches=2).compiled.schedules
    return schedule


def test_copies_have_the_dtype_that_is_computed_in() -> None:
    """In bfloat16 the copies of levels 1 and 2 are gathered in it; those of level 3 lie in parts, made once for all microbatches."""
    for level, part in ((2, 1.0), (3, 0.5)):
        model, mesh, batch = plain({"dp": 2}, torch.float32)
        parallel = compiled(model, mesh, batch, zero=level, precision="bf16", num_microbatches=2)
        assert parallel.verify(*batch, promote=True).worst <= 1e-9
        memory, whole = parallel.summary()["memory"], sum(parameter.numel() for parameter in parallel.parameters())
        assert memory["parameters"] == memory["gradients"] == 4 * whole / 2
        assert memory["parameter_copies"] == 2 * whole * part
        (schedule,) = parallel.compiled.schedules
        assert {schedule.type_of(name)[1] for each in launches(schedule, "all_gather") for name in each.sources} == {torch.bfloat16}


@pytest.mark.parametrize(("level", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)])
def test_gradients_are_summed_in_the_dtype_asked_for(level: int, dtype: torch.dtype) -> None:
    """Of two microbatches; what is handed out is float32."""
    model, mesh, batch = plain({"dp": 2}, torch.float32)
    precision = MixedPrecision(grad=dtype)
    parallel = compiled(model, mesh, batch, zero=level, precision=precision, num_microbatches=2)
    assert parallel.verify(*batch, promote=True).worst <= 1e-9
    (schedule,) = parallel.compiled.schedules
    sums = {each.target for each in schedule.instructions if isinstance(each, Add)} - set(schedule.outputs[:1])
    dtypes = [schedule.type_of(name)[1] for name in sums if schedule.type_of(name)[0]]
    assert dtypes == [dtype] * 4
    parallel(*batch).backward()
    assert {parameter.grad.dtype for parameter in parallel.parameters()} == {torch.float32}


class Uneven(nn.Module):
    """No size but that of the input divides by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.first(x))).square().mean()


@pytest.mark.parametrize(("level", "axes"), [(3, {"dp": 2}), (2, {"dp": 4}), (1, {"pp": 2, "dp": 2})], ids=str)
def test_uneven_parameters_are_padded(level: int, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Uneven().double(), torch.randn(8, 5, dtype=torch.float64)
    parallel = compiled(model, axes, (x,), zero=level)
    report = parallel.verify(x, promote=True)
    assert report and report.worst <= 1e-9, str(report)
    placed = parallel.plan.parameters
    assert {name for name, each in placed.items() if each.padding is not None} == placed.keys() - {"scale"}
    assert "whole on every rank" in parallel.explain(detail="all") and "scale" in parallel.explain(detail="all")


class Pairs(nn.Module):
    """Each sample has rows of its own in the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten()[:6] @ self.table).square().mean()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_rows_of_samples_lie_with_the_samples(level: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    parallel = compiled(Pairs().double(), {"dp": 2}, (x,), zero=level)
    assert parallel.verify(x, promote=True)
    assert parallel.plan.parameters["table"].sharding.axes == ("dp",)


class Scaled(nn.Module):
    """No contraction, and a parameter that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh().sum()


def test_a_model_without_contractions_is_padded_without_gradients_too() -> None:
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    model = Scaled().double()
    parallel = compiled(model, {"dp": 2, "tp": 2}, (x,), zero=1)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), model(x))


# ---- hybrid


@pytest.mark.parametrize("zero", [ZeRO(3, shards=2), ZeRO(2, shards=2), ZeRO(1, shards=2), ZeRO(3, secondary=2)], ids=str)
def test_parts_inside_groups_of_dp(zero: ZeRO) -> None:
    """Reduce-scatters inside a group, all-reduces across; with a secondary shard gathers across groups are one a step."""
    model, mesh, batch = plain({"dp": 4})
    parallel = compiled(model, mesh, batch, zero=zero)
    report = parallel.verify(*batch, promote=True)
    assert report and report.worst <= 1e-9, str(report)
    (schedule,) = parallel.compiled.schedules
    axes = {kind: {each.axes for each in launches(schedule, kind)} for kind in ("all_gather", "reduce_scatter")}
    if zero.secondary is None:
        assert axes == {"all_gather": {("dp.1",)}, "reduce_scatter": {("dp.1",)}}
        assert ("dp.0",) in {each.axes for each in launches(schedule, "all_reduce")}
    else:
        number = len(schedule.signature.inputs_of("parameter"))
        assert axes["all_gather"] == {("dp.0",), ("dp.1",)}
        assert sum(len(each.targets) for each in launches(schedule, "all_gather") if each.axes == ("dp.0",)) == number
    assert str(zero) in parallel.explain(detail="all")


# ---- refusals, plans


def test_what_is_refused() -> None:
    def refused(error: type[Exception], match: str, axes: dict[str, int] | None = None, **options: Any) -> None:
        with pytest.raises(error, match=match):
            compiled(*plain(axes or {"dp": 2}), **options)

    refused(MeshError, "zero=3 splits over the axis dp, and the mesh .* has none", {"tp": 2}, zero=3)
    refused(AutoparError, "zero=4 is no level of ZeRO: use 0, 1, 2 or 3", zero=4)
    refused(PlanError, r"ZeRO\(shards=3\) does not divide dp = 4", {"dp": 4}, zero=ZeRO(3, shards=3))
    pins = {"layers.0.weight": (None, "dp"), "layers.2.weight": ()}
    refused(PlanError, r"'layers.2.weight' \[8, 16\], pinned by the user, is not split over dp", zero=2, pins=pins)
    refused(PlanError, "zero=3, and the plan was made with zero=2", zero=3, plan=compiled(*plain({"dp": 2}), zero=2).plan)
    refused(PlanError, "zero=1, and the plan was made with no ZeRO at all", zero=1, plan=compiled(*plain({"dp": 2})).plan)


def test_what_is_frozen_at_the_first_call_is_trained_later_at_level_3_alone() -> None:
    x = torch.randn(4, 16)
    for level in LEVELS:
        frozen = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
        frozen[0].requires_grad_(False)
        parallel = compiled(frozen, {"dp": 2}, zero=level)
        parallel(x).square().mean().backward()
        frozen[0].requires_grad_(True)
        if level < 3:
            with pytest.raises(
                PlanError, match=r"(?s)'0.weight' \[8, 16\].* use and train it, and freeze it then; zero=3 has what is frozen"
            ):
                parallel(x)
        else:
            parallel(x).square().mean().backward()
            assert frozen[0].weight.grad is not None


def test_what_the_first_call_did_not_use_and_what_the_user_pinned_are_refused_with_what_serves() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, is_late: bool = False) -> Tensor:
            return self.late(self.always(x)) if is_late else self.always(x)

    for level in LEVELS:
        parallel = compiled(Branches(), {"dp": 2}, zero=level)
        parallel(torch.randn(4, 8))
        with pytest.raises(PlanError, match="let the first call .* use and train it") as error:
            parallel(torch.randn(4, 8), is_late=True)
        assert ("zero=3 has" in str(error.value)) == (level < 3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    parallel = compiled(model, {"dp": 2}, zero=1, pins={"0.weight": (None, None)})
    parallel(torch.randn(4, 8))
    model[0].requires_grad_(True)
    with pytest.raises(PlanError, match="drop the pins"):
        parallel(torch.randn(4, 8))


def test_what_is_frozen_after_the_first_call_is_trained_again_at_every_level() -> None:
    x = torch.randn(4, 16)
    for level in LEVELS:
        model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
        plain_model = copy.deepcopy(model)
        parallel = compiled(model, {"dp": 2}, zero=level)
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (parallel, plain_model)]
        for trains in (True, False, True):
            for each, optimizer in zip((model, plain_model), optimizers, strict=True):
                each[0].requires_grad_(trains)
                optimizer.zero_grad()
                (parallel if each is model else plain_model)(x).square().mean().backward()
                optimizer.step()
        assert all(torch.allclose(parallel.full_state_dict()[name], value, atol=1e-6) for name, value in plain_model.state_dict().items())


def test_groups_that_make_no_sense() -> None:
    for options, match in (
        ({"level": 3, "shards": 1}, "makes no parts"),
        ({"level": 0, "shards": 2}, "splits nothing"),
        ({"level": 2, "secondary": 2}, "of level 3"),
        ({"level": 3, "shards": 2, "secondary": 2}, "of level 3"),
        ({"level": True}, "no level"),
    ):
        with pytest.raises(AutoparError, match=match):
            ZeRO(**options)


def test_a_plan_keeps_the_level() -> None:
    model, mesh, batch = plain({"dp": 4})
    parallel = compiled(model, mesh, batch, zero=ZeRO(2, shards=2))
    plan = Plan.from_json(parallel.plan.to_json())
    again = compiled(model, mesh, batch, plan=plan)
    assert plan == parallel.plan and str(again.compiled.schedules[0]) == str(parallel.compiled.schedules[0])


def test_zero_0_keeps_parameters_whole_under_a_budget() -> None:
    model, mesh, batch = plain({"dp": 2})
    whole = sum(parameter.nbytes for parameter in model.parameters())
    kept = compiled(model, mesh, batch, zero=0, memory_budget=40 * whole)
    assert not any(placed.sharding.axes for placed in kept.plan.parameters.values())
    with pytest.raises(PlanError, match="no plan fits"):
        compiled(model, mesh, batch, zero=0, memory_budget=3 * whole)


def test_a_budget_chooses_the_level() -> None:
    """The less memory there is, the less lies whole: all; copies beside masters in parts; nothing but what is in use."""
    model, mesh, batch = plain({"dp": 8})
    whole = sum(parameter.nbytes for parameter in model.parameters())
    found: list[tuple[bool, bool]] = []
    for budget in (6.0, 2.2, 1.6):
        parallel = compiled(model, mesh, batch, memory_budget=budget * whole, cluster="8xH100")
        assert parallel.verify(*batch, promote=True).worst <= 1e-9
        memory = parallel.summary()["memory"]
        assert sum(memory.values()) <= budget * whole
        assert ("chosen as memory asks for it" in parallel.explain(detail="all")) == (budget < 6.0)  # that one does not bind
        found.append((memory["parameters"] == whole, memory["parameter_copies"] > 0))
    assert found == [(True, False), (False, True), (False, False)]


# ---- on the ranks


def num_bytes(value: Any) -> int:
    return local_of(value).untyped_storage().nbytes()


def held(name: str, level: int) -> dict[str, Any]:
    """A step of AdamW on dp2 × tp2: what a rank holds, what was said of it, and how far parameters are off plain torch's afterwards."""
    torch.manual_seed(0)
    case = MODELS[name](1).to(torch.float32)
    reference = copy.deepcopy(case.model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = compiled(case.model, mesh, share(case.batch, mesh), zero=level, optimizer="adamw", num_microbatches=2, timeout=180)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (parallel, reference)]
    for _ in range(2):  # gradients of two backwards are summed in parts
        parallel(**share(case.batch, mesh)).loss.backward()
        reference(**case.batch).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    state = [value for states in optimizers[0].state.values() for value in states.values() if isinstance(value, Tensor)]
    found = {
        "parameters": sum(map(num_bytes, parallel.parameters())),
        # They may lie in buckets, which stay.
        "gradients": sum(local_of(parameter.grad).nbytes for parameter in parallel.parameters()),
        "optimizer_state": sum(map(num_bytes, state)),
    }
    memory, full = parallel.summary()["memory"], parallel.full_state_dict()
    error = max(error_of(full[key], value) for key, value in reference.state_dict().items() if key in full)
    return {"held": found, "predicted": {part: memory[part] for part in found}, "error": error}


@pytest.mark.parametrize(
    ("name", "level"), [("gpt2", 2), pytest.param("llama", 3, marks=pytest.mark.slow), pytest.param("gpt2", 1, marks=pytest.mark.slow)]
)
def test_bytes_on_processes_are_those_predicted(gloo_ranks: GlooRanks, name: str, level: int) -> None:
    for rank in gloo_ranks.run(held, name, level):
        assert rank["held"] == rank["predicted"]
        assert rank["error"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_by_the_default_backend(level: int) -> None:
    case = case_of("gpt2").to(torch.float32)
    parallel = compiled(case.model, {"dp": 2, "tp": 2}, case.batch, zero=level, backend="inductor")
    assert parallel.verify(**case.batch).worst <= 1e-4
