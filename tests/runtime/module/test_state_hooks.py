"""What a model says of its state dict itself: hooks, methods and versions, its own and its layers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.support.captures import compiled


class Scaled(nn.Module):
    """Reads its weight by the name `gamma`, which it once had, and in version 1 turned."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w, self.calls = nn.Parameter(torch.randn(8, 8)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if f"{prefix}gamma" in state:
            state[f"{prefix}w"] = state.pop(f"{prefix}gamma")
        if metadata.get("version", 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"].t()
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # pyright: ignore[reportPrivateUsage]


class Model(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = Scaled(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(super().forward(x).tanh())).square().mean()


X = torch.linspace(-1, 1, 64).view(8, 8)


def models() -> tuple[Model, Model]:
    torch.manual_seed(0)
    found = Model(), Model()
    found[0].calls, found[0].layer.calls = 3, 4
    return found


def old(model: nn.Module) -> dict[str, Any]:
    """A state dict without versions, under the names of old."""
    return {name.removesuffix("w") + "gamma" if name.endswith("w") else name: each for name, each in model.state_dict().items()}


def check(parallel: Any, model: Model, other: Model, plain: Model) -> None:
    state = parallel.full_state_dict()
    assert state.keys() == model.state_dict().keys() == parallel.state_dict().keys()
    assert state["_extra_state"] == {"calls": 3} and state["layer._extra_state"] == {"calls": 4}
    plain.load_state_dict(state)  # of version 2
    assert torch.equal(plain.w, state["w"]) and torch.equal(plain.layer.w, state["layer.w"])
    parallel.load_state_dict(other.state_dict())
    assert all(torch.equal(each, parallel.full_state_dict()[name]) for name, each in other.named_parameters()) and model.calls == 0
    parallel.load_state_dict(old(other))
    plain.load_state_dict(old(other))
    state = parallel.full_state_dict()
    assert all(torch.equal(each, state[name]) for name, each in plain.named_parameters()) and not torch.equal(plain.w, other.w)
    assert parallel.verify(X)


def test_versions_extra_states_and_old_names_are_the_models() -> None:
    model, other = models()
    check(compiled(model, autopar.virtual_mesh(dp=2, tp=2), {"x": X}), model, other, Model())


def on_ranks(axes: dict[str, int], zero: int) -> None:
    model, other = models()
    pins = {"*w": (None, "tp")} if "tp" in axes else None
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    check(compiled(model, mesh, {"x": X}, pins=pins, **({"zero": zero} if zero else {})), model, other, Model())


def test_they_are_on_processes(gloo_ranks: Any) -> None:
    gloo_ranks.run(on_ranks, {"dp": 4}, 3)
    gloo_ranks.run(on_ranks, {"tp": 4}, 0)


class Trimmed(nn.Module):
    """Has a state dict of its own: a head without its frozen backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)).square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: each for name, each in super().state_dict(*args, **kwargs).items() if name.startswith("head.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().load_state_dict(state_dict, strict=False)


def test_methods_of_the_model_are_called() -> None:
    parallel = compiled(Trimmed(), autopar.virtual_mesh(dp=2, tp=2), {"x": X})
    assert list(parallel.state_dict()) == list(parallel.full_state_dict()) == ["head.weight", "head.bias"]
    parallel.load_state_dict({"head.bias": torch.ones(8)})
    assert torch.equal(parallel.head.bias, torch.ones(8)) and parallel.verify(X)


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}body.weight"] = state.pop(f"{prefix}fc.weight")


def named_as_of_old(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}fc.weight"] = state.pop(f"{prefix}body.weight")


def with_hooks(own: nn.Module, seen: list[str]) -> None:
    own.register_load_state_dict_pre_hook(renamed)
    own.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    own.register_state_dict_post_hook(named_as_of_old)


def hooked(on_parallel: bool) -> None:
    model: nn.Module = nn.Sequential()
    model.add_module("body", nn.Linear(8, 8, bias=False))
    seen: list[str] = []
    if not on_parallel:
        with_hooks(model, seen)
    parallel = compiled(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), {"input": X}, zero=3)
    if on_parallel:
        with_hooks(parallel, seen)
    state = parallel.full_state_dict()
    assert list(state) == ["fc.weight"] and type(state["fc.weight"]) is torch.Tensor
    parallel.load_state_dict({"fc.weight": torch.eye(8)})
    assert torch.equal(parallel.full_state_dict()["fc.weight"], torch.eye(8)) and seen == ["loaded"]


def test_hooks_of_the_model_and_of_the_parallel_module_run(gloo_ranks: Any) -> None:
    gloo_ranks.run(hooked, False)
    gloo_ranks.run(hooked, True)
