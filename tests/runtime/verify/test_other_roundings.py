"""Where a model amplifies what bfloat16 rounds, runs that compute the same are told from one that is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.driver.compiled import Compiled
from autopar.graph.emit import Emitter
from autopar.runtime.verify.compare_forms import verify_compiled
from autopar.runtime.verify.limits import Limits
from autopar.runtime.verify.other_roundings import RoundedOtherwise

aten = torch.ops.aten


class Cosines(nn.Module):
    """Sharp attention by cosines, as SwinV2 has it: each layer amplifies what was rounded in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(3))
        self.scale = nn.Parameter(torch.full((2, 1, 1), math.log(10.0)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(x)
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in qkv(x).chunk(3, -1))
            cosines = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
            weights = (cosines * self.scale.clamp(max=math.log(100)).exp()).softmax(-1)
            x = x + norm((weights @ value).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


def case(seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    return Cosines(), {"x": torch.randn(4, 8, 8), "labels": torch.randint(0, 4, (4,))}


def with_gradient_times(compiled: Compiled, name: str, factor: float) -> Compiled:
    local = compiled.local.copy()
    output, results = local.graph.output_node(), list(local.results)
    place = next(index for index, item in enumerate(local.signature.outputs) if (item.kind, item.name) == ("gradient", name))
    results[place] = Emitter(local.graph, output, results[place]).call(aten.mul.Tensor, results[place], factor)
    output.args = (tuple(results),)
    return compiled.with_forms(local=local)


@pytest.mark.parametrize("seed", [24, 73])
def test_what_other_roundings_explain_is_no_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = case(seed)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=call, backend="eager", precision="bf16")
    report = parallel.verify(**call)
    assert report and report.worst > report.gradient_tolerance and report.gradient_limits, str(report)
    assert parallel.verify(**call, promote=True)
    assert not parallel.verify(**call, tolerance=report.tolerance), "a tolerance that was asked for is that of all"

    name = max(report.gradient_limits, key=lambda name: report.gradient_limits[name])
    broken = verify_compiled(model, with_gradient_times(parallel.compiled, name, 1.5), (), call)
    assert not broken and broken.gradient_errors[name] > 0.35, str(broken)
    monkeypatch.setattr(Limits, "beside_other_roundings", lambda self, samples: self)
    assert not parallel.verify(**call)


@pytest.mark.parametrize("name", ["inner.weight", "qkv.0.bias", "head.bias"])
def test_an_error_of_a_hundredth_in_one_gradient_is_found(name: str) -> None:
    model, call = case(1)
    for options in ({"precision": "bf16"}, {}):
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=call, backend="eager", **options)
        broken = with_gradient_times(parallel.compiled, name, 1.01)
        report = verify_compiled(model, broken, (), call, promote=True)
        assert not report and report.gradient_errors[name] == pytest.approx(0.01, rel=1e-3), str(report)
    assert not verify_compiled(model, broken, (), call), "in float32"


def test_a_gradient_may_be_off_by_half_as_much_again_as_other_roundings_take_it() -> None:
    limits = replace(Limits.of(torch.bfloat16, None), by_gradient={"a": 0.1, "d": 0.3})
    found = limits.beside_other_roundings([{"a": 0.02, "b": 0.1, "c": 0.01, "d": 0.1}, {"a": 0.03, "b": 0.08, "c": 0.03, "d": 0.1}])
    assert found.by_gradient == {"a": 0.1, "b": pytest.approx(0.15), "d": 0.3} and found.casts == limits.casts
    assert (found.tolerance, found.gradients) == (limits.tolerance, limits.gradients)
    wide = limits.beside_other_roundings([{"a": 0.3}])
    assert wide.by_gradient["a"] == limits.casts and wide.casts == pytest.approx(0.45)
    assert limits.beside_other_roundings([{"a": math.nan}]).casts == 0.5
    asked = Limits.of(torch.bfloat16, 1e-3)
    assert asked.beside_other_roundings([{"a": 0.3}]) == asked


def test_only_what_operations_round_to_16_bits_is_moved_by_one_neighbour() -> None:
    given: dict[str, Any] = {"dtype": torch.bfloat16, "generator": torch.Generator().manual_seed(0)}
    x, y = torch.randn(64, 64, **given), torch.randn(64, 64, **given)
    with RoundedOtherwise(0):
        product, cast, shown, wide = x * y, x.float().bfloat16(), x.t(), x.float() * y.float()
    assert torch.equal(cast, x) and torch.equal(shown, x.t()) and torch.equal(wide, x.float() * y.float())
    plain = x * y
    moved = product != plain
    assert 0.1 < moved.float().mean() < 0.4
    assert ((product.float() - plain.float()).abs() <= torch.finfo(torch.bfloat16).eps * plain.float().abs()).all()
    with RoundedOtherwise(0):
        special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1.0], dtype=torch.bfloat16) * 1
    torch.testing.assert_close(special, torch.tensor([math.inf, -math.inf, math.nan, 0.0, 1.0], dtype=torch.bfloat16), equal_nan=True)
