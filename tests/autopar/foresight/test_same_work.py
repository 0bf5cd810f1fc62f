"""What is read off a few of equal layers is what is read off all of them, in whatever way a model runs them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.doors import measure_work as door
from autopar.errors import PlanError
from autopar.foresight.work import ModelWork, Part

WIDTH, LAYERS = 16, 5
PARTS = ("forward", "input_gradient", "weight_gradient", "core")


def linears(width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, WIDTH) for _ in range(LAYERS))


class Runs(nn.Module):
    """Five layers that `run` runs, between a table and a head."""

    def __init__(self, run: Callable[[Runs, Tensor], Tensor], more: Callable[[], nn.ModuleList] = linears) -> None:
        super().__init__()
        self.run, self.used = run, 4
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4)
        self.layers, self.more, self.wide = linears(), more(), nn.Linear(LAYERS * WIDTH, WIDTH)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.run(self, self.table(symbols))).square().mean()


def chain(model: Runs, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).relu()
    return x


def residual(model: Runs, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x).relu()
    return x


def scaled_by_their_number(model: Runs, x: Tensor) -> Tensor:
    return chain(model, x) / len(model.layers)


def beside_a_memory(model: Runs, x: Tensor) -> Tensor:
    """What all layers of one list read, another list made: its gradient is added up."""
    memory = x
    for layer in model.layers:
        memory = layer(memory)
    for layer in model.more:
        x = layer(x + memory)
    return x


def two_lists_in_turn(model: Runs, x: Tensor) -> Tensor:
    for one, other in zip(model.layers, model.more, strict=True):
        x = other(one(x).relu())
    return x


def first_few(model: Runs, x: Tensor) -> Tensor:
    for layer in model.layers[: model.used]:
        x = layer(x)
    return x


def by_number(model: Runs, x: Tensor) -> Tensor:
    for number in range(LAYERS):
        x = model.layers[number](x)
    return x


def twice(model: Runs, x: Tensor) -> Tensor:
    return chain(model, chain(model, x))


def backwards(model: Runs, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def every_other(model: Runs, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x) if number % 2 else layer(x.relu())
    return x


def the_last_on_less(model: Runs, x: Tensor) -> Tensor:
    for layer in model.layers[:-1]:
        x = layer(x)
    return model.layers[-1](x[:, :1])


def several_scales(model: Runs, x: Tensor) -> Tensor:
    return torch.stack([layer(x) for layer in model.layers]).mean(0)


def summed(model: Runs, x: Tensor) -> Tensor:
    return sum((layer(x) for layer in model.layers), x)


def concatenated(model: Runs, x: Tensor) -> Tensor:
    return model.wide(torch.cat([layer(x) for layer in model.layers], -1))


def unpacked(model: Runs, x: Tensor) -> Tensor:
    one, two, three, four, five = model.layers
    return one(x) * two(x) + three(x) * four(x) + five(x)


def down_and_up(model: Runs, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for layer in model.layers:
        x = layer(x).relu()
        kept.append(x)
    for layer in model.more:
        x = layer(torch.cat([x, kept.pop()], -1))
    return x


def one_before_the_last(model: Runs, x: Tensor) -> Tensor:
    outputs = [x]
    for layer in model.layers:
        outputs.append(layer(outputs[-1]))
    return outputs[-1] + outputs[-2]


EQUAL = [chain, residual, scaled_by_their_number, beside_a_memory, two_lists_in_turn, twice, backwards, summed]
OTHER = [first_few, by_number, every_other, the_last_on_less, several_scales, concatenated, unpacked, one_before_the_last]


def totals(work: ModelWork) -> dict[str, Any]:
    """Of a microbatch of three samples."""
    found: Counter[str] = Counter()
    for block in work.expanded():
        for name in PARTS:
            part: Part = getattr(block, name)
            found[f"{name} flops"] += part.flops.of(3)
            found[f"{name} bytes of products"] += sum(each.bytes.of(3) for each in part.products)
            found[f"{name} sent"] += sum(each.input.of(3) + each.output.of(3) for each in part.transfers)
            for amount in ("eager_bytes", "fused_bytes"):
                found[f"{name} {amount}"] += getattr(part, amount).of(3)
            for number in ("eager_kernels", "fused_kernels"):
                found[f"{name} {number}"] += getattr(part, number)
        for amount in ("saved", "saved_outside_core", "inputs", "gathered"):
            found[amount] += getattr(block, amount).of(3)
        found["parameters"] += block.num_parameters
        found["gradient sums"] += sum(each.input.of(3) for each in block.gradient_sums)
    return {**found, "working": max(each.eager_working for each in work.blocks), "layers": work.num_layers}


def works(model: nn.Module, monkeypatch: pytest.MonkeyPatch, tp: int = 1) -> tuple[ModelWork, ModelWork]:
    """As it is measured, and of all layers."""
    symbols = torch.zeros(2, 8, dtype=torch.int64)
    found = autopar.measure_work(model, (symbols,), "8xA100", tp)
    monkeypatch.setattr(door, "_few", lambda *_: None)
    return found, autopar.measure_work(model, (symbols,), "8xA100", tp)


def assert_equal(found: ModelWork, wanted: ModelWork) -> None:
    assert totals(found) == {name: pytest.approx(value, rel=1e-9) for name, value in totals(wanted).items()}


@pytest.mark.parametrize("run", [*EQUAL, *OTHER], ids=lambda run: run.__name__)
def test_a_few_layers_do_the_work_of_all(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = works(Runs(run), monkeypatch)
    assert_equal(found, wanted)
    is_short = max(block.count for block in found.blocks) > 1
    assert is_short == (run in EQUAL)


def test_a_list_that_is_read_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal(*works(Runs(down_and_up, lambda: linears(2 * WIDTH)), monkeypatch))


def test_layers_split_over_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal(*works(Runs(residual), monkeypatch, tp=2))


def test_what_stands_between_layers_is_repeated_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = works(Runs(residual), monkeypatch)
    assert [block.is_layer for block in found.expanded()] == [block.is_layer for block in wanted.expanded()]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.body = nn.Sequential(OrderedDict((f"block{number}", nn.Linear(WIDTH, WIDTH)) for number in range(LAYERS)))

    def forward(self, symbols: Tensor) -> Tensor:
        return self.body(self.table(symbols)).square().mean()


def test_layers_of_a_sequential_may_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = works(Named(), monkeypatch)
    assert_equal(found, wanted)
    assert found.num_layers == LAYERS and [block.name for block in found.blocks if block.is_layer] == [
        "body.block0",
        "body.block1",
        "body.block4",
    ]


def test_a_pin_of_some_layers_is_kept() -> None:
    symbols = torch.zeros(2, 8, dtype=torch.int64)
    pins = {"layers.3.weight": ("tp", None), "layers.1.weight": (None, "tp")}
    found = autopar.measure_work(Runs(chain), (symbols,), "8xA100", 2, pins)
    held = [block.parameters for block in found.expanded() if block.is_layer]
    assert len(held) == LAYERS and all(block.count == 1 for block in found.blocks)
    all_alike = autopar.measure_work(Runs(chain), (symbols,), "8xA100", 2, {"layers.*.weight": ("tp", None)})
    assert max(block.count for block in all_alike.blocks) == LAYERS - 2


def test_a_pin_of_no_layer_is_said_of_the_model() -> None:
    """Not of the model with few layers, which nobody has written."""
    with pytest.raises(PlanError, match=r"layers\.9\.weight.* matches no parameter; there are layers\.0\.weight"):
        autopar.measure_work(Runs(chain), (torch.zeros(2, 8, dtype=torch.int64),), "8xA100", 2, {"layers.9.weight": ("tp", None)})


def test_plans_of_lists_that_are_no_chain() -> None:
    symbols = torch.zeros(4, 8, dtype=torch.int64)
    ranked = autopar.rank_plans(Runs(concatenated), cluster="8xH100:2", example_inputs=(symbols,), global_batch=8)
    assert ranked.plans
    parallel = autopar.compile(Runs(unpacked), autopar.virtual_mesh(world=2), example_inputs=(symbols,), backend="eager")
    assert parallel.mesh.size == 2
