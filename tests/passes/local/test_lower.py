"""Lowering: local shapes, collectives with their waits, and the values of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.checks.checker import check
from autopar.driver.manager import run_passes
from autopar.ir.collectives import is_launch, reshard, wait
from autopar.ir.keys import BATCH, DIMS, ORIGIN, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.reshard import steps
from autopar.ir.sharding import Dims, Sharding, Strategy, flat, shape_of
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.local.lower import Lower
from autopar.testing.random_shardings import RandomShardings
from tests.support.graphs import traced, values, with_atoms
from tests.support.programs import assert_close, run_schedule
from tests.support.schedules import scheduled
from tests.support.shardings import MESHES, dims_of, shardings

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2)))


def one_reshard(dims: Dims, source: Sharding, target: Sharding, mesh: Mesh) -> Program:
    """x, lying as `source`, returned as `target`."""
    graph, shape = Graph(), shape_of(dims)
    x = graph.placeholder("x")
    y = graph.call_function(reshard, (x, target))
    graph.output((y,))
    with fake_mode():
        x.meta["val"] = y.meta["val"] = torch.empty(shape, dtype=torch.float64)
    for node, sharding in ((x, source), (y, target)):
        DIMS[node], SHARDING[node], BATCH[node] = (dims,), (sharding,), ((),)
    STRATEGY[x], PHASE[y], SOURCE[y] = Strategy((), (source,)), "forward", Source()
    signature = Signature(
        (Input("parameter", "x", shape, torch.float64, dims=dims, sharding=source),),
        (Output("output", "y", shape, torch.float64, dims=dims, sharding=target),),
    )
    return Program(graph, mesh, signature, Form.GLOBAL)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_reshard_runs_and_keeps_the_value(data: st.DataObject) -> None:
    mesh, dims = data.draw(st.sampled_from(MESHES)), data.draw(dims_of())
    source = data.draw(shardings(dims, mesh))
    target = data.draw(shardings(dims, mesh, within=source))
    assume(source != target)
    program = one_reshard(dims, source, target, mesh)
    local = Lower().apply(program)
    check(local, origin=program)
    launches = [node.target.__name__ for node in local.graph.nodes if is_launch(node)]
    assert launches == [step.collective for step in steps(dims, source, target, mesh) if step.collective != "slice"]
    x = torch.randint(-50, 50, shape_of(dims)).double()
    if any(kind == "max" for _, kind in source.unreduced):
        x = x.abs()
    found = run_schedule(scheduled(local).places[0], mesh, {("parameter", "x"): x})
    torch.testing.assert_close(found["output", "y"], x, rtol=1e-12, atol=1e-12)


def layer(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    """Products, a normalisation with three results, a fused projection taken apart, positions, sums."""
    hidden = aten.mm.default(x, w)
    normed, mean, _ = aten.native_layer_norm.default(hidden, [24], None, None, 1e-5)
    parts = aten.view.default(normed, [8, 3, 8])
    query, key = aten.select.int(parts, 1, 0), aten.select.int(parts, 1, 1)
    gated = aten.mul.Tensor(aten.sigmoid.default(query), aten.add.Tensor(key, 1.0))
    shifted = aten.add.Tensor(gated, aten.arange.default(8, dtype=torch.float64))
    product = aten.mm.default(shifted, v)
    return [product, aten.amax.default(product, [1]), mean, aten.sum.default(aten.exp.default(aten.neg.default(product)))]


INPUTS = tuple(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for shape in ((8, 12), (12, 24), (8, 4)))


def decided(seed: int, function: Callable[..., Any] = layer, mesh: Mesh = MESH) -> Program:
    program = with_atoms(traced(function, *INPUTS, mesh=mesh, parameters=(1, 2)))
    return run_passes(program, (RandomShardings(seed), InsertReshards()))


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_of_a_layer(seed: int) -> None:
    program = decided(seed)
    local = Lower().apply(program)
    check(local, origin=program)
    whole = values(program, *INPUTS)
    named = {(item.kind, item.name): tensor for item, tensor in zip(program.signature.inputs, INPUTS, strict=True)}
    found = run_schedule(scheduled(local).places[0], local.mesh, named)
    wanted = {(item.kind, item.name): value for item, value in zip(program.signature.outputs, whole, strict=True)}
    assert_close(found, wanted, 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_every_value_has_its_local_shape_and_names_its_origin(seed: int) -> None:
    program = decided(seed)
    local = Lower().apply(program)
    by_name = {node.name: node for node in program.graph.nodes}
    assert local.form is Form.LOCAL and program.form is Form.GLOBAL
    for node in local.graph.nodes:
        if node in ORIGIN:
            origin = by_name[ORIGIN[node]]
            for dims, sharding, value in zip(DIMS[origin], SHARDING[origin], _results(node.meta["val"]), strict=True):
                assert value is None or tuple(value.shape) == sharding.local_shape(dims, program.mesh), (node, sharding)
        if node.op == "call_function":
            assert node in PHASE and node in SOURCE, node


def _results(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def test_each_launch_has_one_wait_and_nothing_else_reads_it() -> None:
    for seed in range(4):
        for node in Lower().apply(decided(seed)).graph.nodes:
            if is_launch(node):
                assert [user.target for user in node.users] == [wait]
                assert node.all_input_nodes[0].meta["val"].is_contiguous(), "collectives send contiguous memory"


def test_coordinates_are_inputs_behind_all_others() -> None:
    local = Lower().apply(decided(1))
    kinds = [item.kind for item in local.signature.inputs]
    assert kinds == sorted(kinds, key=lambda kind: kind == "coordinate")
    assert len(kinds) == len(local.placeholders)
    coordinates = local.signature.inputs_of("coordinate")
    assert coordinates and len({item.name for item in coordinates}) == len(coordinates)
    assert all(set(item.name.split(",")) <= set(MESH.names) for item in coordinates)


def test_a_replicated_plan_is_the_program_itself() -> None:
    """On a mesh of one rank nothing moves, and the calls are those of the GLOBAL program."""
    program = decided(0, mesh=Mesh((("dp", 1),)))
    local = Lower().apply(program)
    assert not any(is_launch(node) for node in local.graph.nodes)
    assert not local.signature.inputs_of("coordinate")
    shapes = [node.meta["val"].shape for node in local.placeholders]
    assert shapes == [tensor.shape for tensor in INPUTS]


def test_literal_shapes_become_local() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        product = aten.view.default(aten.mm.default(x, w), [8, 3, 8])
        return aten.add.Tensor(aten.expand.default(aten.sum.dim_IntList(product, [1], True), [8, 3, 8]), product)

    program = with_atoms(traced(function, *INPUTS, mesh=Mesh((("tp", 4),)), parameters=(1, 2)))
    seeds = [run_passes(program, (RandomShardings(seed), InsertReshards(), Lower())) for seed in range(12)]
    literals = {
        str(node.args[1]) for local in seeds for node in local.graph.nodes if node.target in (aten.reshape.default, aten.expand.default)
    }
    assert any("2]" in literal for literal in literals), literals
    for local in seeds:
        check(local)


def test_the_mesh_of_the_signature_is_the_refined_one() -> None:
    local = Lower().apply(decided(2))
    for item in local.signature.inputs:
        if item.sharding is not None:
            assert not item.sharding.problems(item.dims, local.mesh)
            assert len(item.sharding.splits) == len(flat(item.dims))
    assert replace(local.signature, inputs=()).outputs == decided(2).signature.outputs
