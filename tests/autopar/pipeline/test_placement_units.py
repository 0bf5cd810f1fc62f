"""A program as a line of units: nothing lost, nothing twice, and cut as the stages of its nodes are."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import OptimizerKind
from autopar.cost.model import CostModel
from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.ir.keys import PHASE, STRATEGY
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.pipeline.assign import assign_stages
from autopar.pipeline.placement import Devices, place, placed_at
from autopar.pipeline.placement_units import ProgramLine, line_of

BATCH, LENGTH, WIDTH, VOCABULARY, NUM_LAYERS = 2, 8, 16, 32, 3
HIDDEN_BYTES = BATCH * LENGTH * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.fused(self.norm(x)).chunk(3, -1)
        heads = [each.view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2) for each in (query, key, value)]
        attended = functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tied embeddings, a mask from the tokens that every layer reads, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x, mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def captured(model: nn.Module, *args: Tensor, training: bool = True, mesh: dict[str, int] | None = None) -> tuple[Program, CostModel]:
    """GLOBAL with reshards, and the prices it was decided by."""
    forward = capture(model, args, {}, virtual_mesh(**(mesh or {"dp": 1})), None, {0: 0})
    passes = default_passes(Options(Cluster.named("8xH100")), training, None)
    last = next(number for number, each in enumerate(passes) if isinstance(each, InsertReshards))
    program = run_passes(forward, passes[: last + 1])
    return program, CostModel(Cluster.named("8xH100"), program.mesh, OptimizerKind("sgd", 0, 0))


@cache
def decoder() -> tuple[Program, CostModel, ProgramLine]:
    program, cost = captured(Decoder(), torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    return program, cost, line_of(program, cost)


def test_every_call_is_in_one_unit_or_copied() -> None:
    program, _, found = decoder()
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    placed = [node for nodes in found.nodes for node in nodes]
    assert len(placed) == len(set(placed))
    assert set(placed) | set(found.copied) == set(calls)
    assert not found.copied.intersection(placed)
    assert len(found.nodes) == len(found.line.units)


def test_seconds_and_bytes_are_neither_lost_nor_counted_twice() -> None:
    program, cost, found = decoder()
    for phase in ("forward", "backward"):
        calls = [node for node in program.graph.nodes if node.op == "call_function" and PHASE.get(node) == phase]
        units = sum(unit.forward_seconds if phase == "forward" else unit.backward_seconds for unit in found.line.units)
        assert units == pytest.approx(sum(cost.node(node, STRATEGY[node]).seconds for node in calls))
    parameters = sum(parameter.numel() * 4 for parameter in Decoder().parameters())
    held = sum(unit.held_bytes for unit in found.line.units) + sum(shared.bytes for shared in found.line.shared)
    assert held == 2 * parameters  # and the gradients


def test_tied_embeddings_are_shared_by_the_ends() -> None:
    _, _, found = decoder()
    (shared,) = found.line.shared
    names = [found.line.units[unit].name for unit in shared.units]
    assert names[0].startswith("embedding aten.embedding") and names[-1].startswith("head aten.mm")
    assert shared.bytes == 2 * VOCABULARY * WIDTH * 4


def test_between_layers_the_hidden_state_is_all_that_is_sent() -> None:
    """No mask, no positions, and not a second time as the view that the next product reads."""
    _, _, found = decoder()
    first = min(n for n, unit in enumerate(found.line.units) if unit.name.startswith("layers.1.norm"))
    crossing = [value for value in found.line.values if value.producer < first <= max(value.readers)]
    assert [(value.bytes, value.has_gradient) for value in crossing] == [(HIDDEN_BYTES, True)]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_units_are_cut_as_nodes_are(num_stages: int) -> None:
    program, _, found = decoder()
    placed = place(found.line, Devices.equal(num_stages, seconds_per_byte=1e-9), [1] * num_stages)
    stages = assign_stages(program, found.forward_stages(placed.stage_of), num_stages)
    expected = {node: stage for nodes, stage in zip(found.nodes, placed.stage_of, strict=True) for node in nodes}
    assert stages == expected
    assert set(stages.values()) == set(range(num_stages))


def test_activations_flow_to_later_units_and_gradients_to_earlier_ones() -> None:
    _, _, found = decoder()
    unit_of = {node: unit for unit, nodes in enumerate(found.nodes) for node in nodes}
    for node, unit in unit_of.items():
        for operand in node.all_input_nodes:
            if operand in unit_of and PHASE[node] == "forward":
                assert unit_of[operand] <= unit, f"{node} reads {operand}"
            elif operand in unit_of and PHASE[operand] == "backward":
                assert unit_of[operand] >= unit, f"{node} reads {operand}"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) * self.narrow(x).relu().expand(BATCH, WIDTH)).sum()


def test_what_a_view_shows_larger_is_sent_small() -> None:
    program, cost = captured(Scaled(), torch.randn(BATCH, WIDTH))
    found = line_of(program, cost)
    units = [n for n, nodes in enumerate(found.nodes) if any("expand" in str(node.target) and PHASE[node] == "forward" for node in nodes)]
    assert len(units) == 1 and found.line.units[units[0]].name.endswith("aten.expand")
    sent = [value.bytes for value in found.line.values if units[0] in value.readers]
    assert sent == [BATCH * 4]


def test_frozen_layers_need_no_gradient_back() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model[0].requires_grad_(False)
    program, cost = captured(nn.Sequential(model, nn.Flatten(0), Sum()), torch.randn(BATCH, WIDTH))
    line = line_of(program, cost).line
    border = min(n for n, unit in enumerate(line.units) if unit.name.startswith("0.2"))
    assert [value.has_gradient for value in line.values if border in value.readers] == [False]
    assert all(value.has_gradient for value in line.values if value.producer >= border)
    assert all(unit.backward_seconds == 0 for unit in line.units[:border])


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_tensor_parallel_stages_hold_and_send_a_rank_s_part() -> None:
    program, cost = captured(Decoder(), torch.zeros(BATCH, LENGTH, dtype=torch.int64), mesh={"dp": 2})
    line, (_, _, whole) = line_of(program, cost).line, decoder()
    assert len(line.units) == len(whole.line.units)
    assert max(value.bytes for value in line.values) == max(value.bytes for value in whole.line.values) / 2
    assert sum(unit.saved_bytes for unit in line.units) < 0.7 * sum(unit.saved_bytes for unit in whole.line.units)


def test_where_it_is_cut_changes_what_a_stage_takes_and_not_the_sum() -> None:
    _, _, found = decoder()
    number = len(found.line.units)
    totals = {sum(placed_at(found.line, Devices.equal(2), [1, 1], (0, cut)).seconds) for cut in (1, number // 2, number - 1)}
    assert max(totals) == pytest.approx(min(totals))


def test_the_backward_of_a_product_is_in_its_unit() -> None:
    """Also that of its weight, which reads the product's operand as a view made anew."""
    _, _, found = decoder()
    (unit,) = (n for n, unit in enumerate(found.line.units) if unit.name == "layers.1.down aten.mm")
    assert sum(str(node.target) == "aten.mm.default" for node in found.nodes[unit]) == 3


def test_a_buffer_behind_a_chain_of_diamonds_takes_no_time() -> None:
    """2^60 ways lead from what the buffer becomes, through calls that every stage makes for itself, to what it is made of."""

    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            count = x[0] * 1
            for _ in range(60):
                count = count - 0.5 * count
            self.count.copy_(count)
            return self.second(self.first(x).relu()).square().mean()

    program, cost = captured(Counting(), torch.zeros(BATCH, WIDTH))
    assert len(line_of(program, cost).line.units) > 2
