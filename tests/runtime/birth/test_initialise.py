"""Models on meta that are born of their own initialisers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import MeshError, WeightsError
from autopar.runtime.birth.initialise import Initialised
from tests.support.captures import compiled
from tests.support.models.zoo import ZOO, Case
from tests.support.ranks import share


def on_meta(case: Case) -> nn.Module:
    """The same model without values, in float32."""
    model: Any = case.model
    with torch.device("meta"):
        return type(model)(model.config).train()


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def born(model: nn.Module, seed: int = 0, also: Callable[[nn.Module], object] | None = None) -> dict[str, Tensor]:
    values = Initialised(model, seed, also)
    return {name: values.whole(name) for name in state(model)}


@pytest.mark.parametrize("name", ZOO)
def test_values_are_those_that_building_the_model_draws(name: str) -> None:
    """What is constant is equal, what is drawn has the same deviation, and all is float32 as built."""
    case = ZOO[name](num_layers=2)
    model = on_meta(case)
    built, found = state(type(model)(case.model.config)), born(model)
    assert found.keys() == built.keys()
    for each, tensor in found.items():
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (built[each].shape, built[each].dtype, "cpu")
        if not built[each].is_floating_point() or built[each].std(correction=0) == 0 or "inv_freq" in each:
            assert torch.equal(tensor, built[each]), each
        else:
            assert 0.7 < tensor.std() / built[each].std() < 1.4, each
            assert torch.equal(tensor == 0, built[each] == 0), each  # the row of the padding token


def test_a_virtual_mesh_runs_with_them() -> None:
    case = ZOO["llama"]().to(torch.float32)
    torch.manual_seed(5)
    parallel = compiled(on_meta(case), {"dp": 2}, weights="init")
    plain = on_meta(case).to_empty(device="cpu")
    plain.load_state_dict(parallel.state_dict())
    for (_, own), (_, other) in zip(parallel.named_buffers(), plain.named_buffers(), strict=True):
        other.copy_(own)
    torch.testing.assert_close(parallel(**case.batch).loss, plain(**case.batch).loss)


def on_ranks(name: str, axes: dict[str, int]) -> tuple[dict[str, Tensor], float, list[str]]:
    """Whole values, the loss, and what this rank holds."""
    case = ZOO[name](num_layers=axes.get("pp", 1)).to(torch.float32)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    torch.manual_seed(5 + dist.get_rank())  # that of rank 0 counts
    parallel = compiled(on_meta(case), mesh, weights="init")
    loss = float(parallel(**share(case.batch, mesh)).loss.detach())
    return parallel.full_state_dict() | dict(parallel.named_buffers()), loss, [each for each, _ in parallel.named_parameters()]


MESHES = [
    pytest.param(name, axes, marks=() if (name, "tp" in axes) == ("gpt2", True) else pytest.mark.slow)
    for name in ZOO
    for axes in ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2})
]


@pytest.mark.parametrize(("name", "axes"), MESHES)
def test_values_are_the_same_on_real_ranks(gloo_ranks: Any, name: str, axes: dict[str, int]) -> None:
    case = ZOO[name](num_layers=axes.get("pp", 1)).to(torch.float32)
    torch.manual_seed(5)
    virtual = compiled(on_meta(case), {"dp": 1}, weights="init")
    wanted, loss = state(virtual), float(virtual(**case.batch).loss.detach())
    results = gloo_ranks.run(on_ranks, name, axes)
    for values, ranks_loss, _ in results:
        assert all(torch.equal(values[each], tensor) for each, tensor in wanted.items())
        assert ranks_loss == pytest.approx(loss, rel=1e-5)
    held = [set(names) for _, _, names in results]
    assert held[0] != held[-1] if "pp" in axes else held[0] == held[-1] == set(dict(virtual.named_parameters()))


class Noting(nn.Module):
    """Notes what is real while it is initialised."""

    def __init__(self, log: list[tuple[str, ...]]) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4, 4))
        self.log = log
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.log.append(tuple(name for name, each in self.named_parameters() if not each.is_meta))
        for each in (self.a, self.b):
            nn.init.normal_(each)


def test_one_tensor_is_real_at_a_time_and_torchs_generator_stays_as_it_was() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Noting(log := []), Noting(log))
    before = torch.get_rng_state()
    values = Initialised(model, 0)
    log.clear()
    values.whole("1.b")
    values.whole("0.a")
    assert log == [("b",), ("a",)]
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_depend_on_seed_and_name_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Noting([]), Noting([]))
    first, again, other = born(model), born(model), born(model, seed=1)
    assert all(torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["0.a"], first["1.a"])
    values = Initialised(model, 0)
    assert all(torch.equal(values.whole(name), first[name]) for name in reversed(first))


class Copying(nn.Module):
    """`b` and `c` are made of `a`; `whole` is set anew; `mask` is a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.empty(5)) for _ in range(3))
        self.whole = nn.Parameter(torch.empty(2, 2))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.a)
        self.b.data = self.b.data.copy_(self.a.data)
        with torch.no_grad():
            self.c.copy_(torch.stack([self.a * 2, self.b])[0] + 1)
            self.mask.copy_(torch.tensor([True, False, True]))
        self.whole = nn.Parameter(torch.full((2, 2), 7.0))


def test_what_is_made_of_other_values_is_drawn_with_them() -> None:
    with torch.device("meta"):
        model = Copying()
    whole = model.whole
    found = born(model)
    assert torch.equal(found["b"], found["a"]) and torch.equal(found["c"], 2 * found["a"] + 1)
    assert found["whole"].tolist() == [[7.0, 7.0], [7.0, 7.0]] and found["mask"].tolist() == [True, False, True]
    assert model.whole is whole and all(each.is_meta for each in state(model).values())


class Scale(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))


class Half(Scale):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain[:2])


class Looking(Scale):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 1 / float(self.gain.sum()))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Scale, r"no initialiser writes '1.gain' \(of a Scale\): give the module a reset_parameters\(\)"),
        (Half, r"leave parts of '1.gain' \(of a Half\) unwritten"),
        (Looking, "reset_parameters of 1 cannot be tried without values"),
    ],
)
def test_what_has_no_initialiser_is_refused_by_name(module: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), module())
    with pytest.raises(WeightsError, match=message):
        compiled(model, {"dp": 2}, weights="init")


def test_a_function_initialises_what_has_no_initialiser_of_its_own() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.gain, 3)

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    found = compiled(model, {"dp": 2}, weights=init)
    assert found.get_parameter("1.gain").tolist() == [3, 3, 3] and found.get_parameter("0.weight").std() > 0


def test_real_values_are_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1] = real = nn.Linear(3, 3)
    kept = real.weight.detach().clone()
    parallel = compiled(model, {"dp": 2}, weights="init")
    assert torch.equal(parallel.get_parameter("1.weight"), kept) and not parallel.get_parameter("0.weight").is_meta


def unequal() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if dist.get_rank() == 1:
        model[0].to_empty(device="cpu")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(MeshError) as error:
        compiled(model, mesh, (torch.ones(2, 4),), weights="init", outputs="all")
    return str(error.value)


def test_ranks_that_are_on_meta_in_part_are_refused(gloo_ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    assert all("ranks have other weights: '0.weight' is meta on rank 0 and" in text for text in gloo_ranks.run(unequal))
