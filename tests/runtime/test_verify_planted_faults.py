"""Faults planted into a compiled program, one at a time, that values show: verify names node, user's line and pass, or the rank.

Those that the check names before anything runs are in `tests/autopar/test_planted_faults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

import autopar
from autopar import Cluster, virtual_mesh
from autopar.driver.compiled import Compiled
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_reduce, reduce_scatter, wait
from autopar.ir.keys import ORIGIN
from autopar.ir.program import Program, operands
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.runtime.execute.virtual_world import VirtualWorld
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.verify.compare_forms import verify_compiled
from autopar.runtime.verify.compare_values import Scales
from autopar.runtime.verify.verify import verify
from tests.support.faults.compiled import (
    MESH,
    batch,
    compile_tiny,
    consumer,
    emit_between,
    first,
    gathered,
    model,
    reduced_over,
    revalue,
    verified,
)

aten = torch.ops.aten


@pytest.fixture(scope="module")
def tiny() -> Compiled:
    return compile_tiny()


def test_nothing_is_found_where_nothing_was_planted(tiny: Compiled) -> None:
    assert verified(tiny)


# --- faults in the LOCAL program that only values show: verify names node, line and pass


def _wrong_coordinate(program: Program) -> str:
    """Every tp rank masks the vocabulary as if it were the first."""
    coordinate = next(node for item, node in program.named_inputs() if item.kind == "coordinate" and item.name == "tp")
    node = first(program, lambda node: node.target is aten.mul.Tensor and coordinate in operands(node))
    node.args = (node.args[0], 0)
    return _origin(node)


def _wrong_gather_order(program: Program) -> str:
    launch = gathered(program)
    completed = consumer(launch)
    emit_between(completed, consumer(completed), lambda emit, value: emit.call(aten.flip.default, value, [0]))
    return _origin(completed)


def _wrong_atom(program: Program) -> str:
    """The reduce-scatter cuts the value as it lies, without bringing the atom to cut to the front."""

    def is_laid_out(node: Node) -> bool:
        return node.target is aten.clone.default and operands(node)[0].target is aten.permute.default

    launch = first(program, lambda node: node.target is reduce_scatter and is_laid_out(operands(node)[0]))
    laid_out = operands(launch)[0]
    value = operands(operands(laid_out)[0])[0]
    emit_between(laid_out, launch, lambda emit, _: emit.call(aten.reshape.default, value, list(laid_out.meta["val"].shape)))
    return _origin(launch)


def _rounded_on_the_wire(program: Program) -> str:
    """A dtype too narrow, and back again: shapes and dtypes fit."""
    launch = first(program, lambda node: reduced_over(node, "dp") and node.meta["val"].ndim == 2)
    emit_between(launch.args[0], launch, lambda emit, value: emit.cast(emit.cast(value, torch.int32), torch.float32))
    return _origin(launch)


def _strided_statistics(program: Program) -> str:
    """Mean and deviation of the norm as a view: the CPU kernel of the backward reads them as if they were contiguous."""
    node = first(program, lambda node: node.target is aten.native_layer_norm_backward.default)
    for value in (node.args[3], node.args[4]):
        order = [1, 0, *range(2, value.meta["val"].ndim)]

        def strided(emit: Emitter, value: Node, order: list[int] = order) -> Node:
            turned = emit.call(aten.permute.default, value, order)
            turned = emit.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
            return emit.call(aten.permute.default, turned, order)

        emit_between(value, node, strided)
    return _origin(node)


def _own_slice_kept(program: Program) -> str:
    """A replica that is none: a value that all tp ranks should hold is scaled by the rank."""
    coordinate = next(node for item, node in program.named_inputs() if item.kind == "coordinate" and item.name == "tp")
    node = first(program, lambda node: node.target is aten.native_layer_norm.default)
    emit_between(node.args[0], node, lambda emit, value: emit.call(aten.add.Tensor, value, coordinate))
    return _origin(node)


def _origin(node: Node) -> str:
    """The GLOBAL node whose part the values from `node` on make up."""
    while node not in ORIGIN:
        node = next(user for user in node.users)
    return ORIGIN[node]


@pytest.mark.parametrize(
    "plant",
    [_wrong_coordinate, _wrong_gather_order, _wrong_atom, _rounded_on_the_wire, _strided_statistics, _own_slice_kept],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_verify_names_faults_in_the_local_program(tiny: Compiled, plant: Callable[[Program], str]) -> None:
    program = tiny.local.copy()
    name = plant(program)
    revalue(program)
    report = verified(tiny.with_forms(local=program))
    assert not report and report.first_difference is not None
    assert (report.first_difference.node, report.first_difference.made_by) == (name, "lower"), str(report)
    assert "compiled.py:" in report.first_difference.source


class Classifier(nn.Module):
    """Its classes stay split over tp: there is no other dim that tp might split."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("instead", [aten.amax.default, aten.sum.dim_IntList])
def test_verify_names_classes_whose_parts_are_joined_wrongly(instead: Any) -> None:
    """Each tp rank has the log-sum-exp of its part of the logits; of the parts, the largest or the sum is taken."""
    torch.manual_seed(0)
    model, batch = Classifier(), {"x": torch.randn(6, 8), "labels": torch.randint(0, 12, (6,))}
    fused = autopar.compile(
        model, virtual_mesh(tp=2), example_inputs=batch, backend="eager", cluster=Cluster.ideal(), pins={"head.weight": ("tp", None)}
    ).compiled
    program = fused.local.copy()
    node = first(program, lambda node: node.target is aten.logsumexp.default)
    name = _origin(node)
    node.target = instead
    revalue(program)
    reports = [verify_compiled(model, each, (), batch, promote=True, key=1) for each in (fused, fused.with_forms(local=program))]
    assert reports[0] and not reports[1] and reports[1].first_difference is not None
    assert (reports[1].first_difference.node, reports[1].first_difference.made_by) == (name, "lower"), str(reports[1])


def test_verify_compares_replicas(tiny: Compiled) -> None:
    """The all-reduce of one gradient is missing on the way out: every rank holds half a sum, and all differ."""
    program = tiny.local.copy()
    index = next(i for i, item in enumerate(program.signature.outputs) if item.name == "norm.weight")
    completed = program.results[index]
    while completed.target is not wait:
        completed = operands(completed)[0]
    launch = operands(completed)[0]
    assert launch.target is all_reduce, launch
    completed.replace_all_uses_with(operands(launch)[0])
    report = verified(tiny.with_forms(local=program))
    assert not report and report.replica_errors["gradient norm.weight"] > 1e-3
    assert set(name for name, error in report.replica_errors.items() if error) == {"gradient norm.weight"}


# --- faulty passes: verify names the pass


@dataclass(frozen=True)
class Faulty:
    """A pass with a fault."""

    plant: Callable[[Program], Any]
    name: str = "faulty"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        self.plant(program)
        return program


def _mean_over_all_labels(program: Program) -> None:
    """The loss is divided by the number of labels, ignored ones included."""
    division = first(program, lambda node: node.target is aten.div.Tensor)
    division.replace_input_with(operands(division)[1], Emitter(program.graph, division).call(aten.scalar_tensor.default, 32))


def _folded_scaling(program: Program) -> str:
    """The sign of the gradient into the head is taken for a no-op."""
    node = first(program, lambda node: node.target is aten.neg.default)
    user = consumer(node)
    user.replace_input_with(node, operands(node)[0])
    return user.name


def _same_site_twice(program: Program) -> str:
    """Two dropouts read the words of one site."""
    selects = [node for node in program.graph.nodes if node.target is aten.select.int and node.meta["val"].dtype == torch.int64]
    assert len(selects) == 4
    for twin, original in zip(selects[2:], selects[:2], strict=True):
        twin.args = original.args
    return selects[2].name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_verify_names_a_faulty_forward_pass(dropout: float) -> None:
    report = verified(compile_tiny(dropout, Faulty(_mean_over_all_labels), DecomposeLosses), dropout)
    assert not report and report.first_difference is not None and report.loss_error > 0.1
    assert report.first_difference.made_by == "faulty" and report.first_difference.node.startswith("div"), str(report)


def test_verify_names_a_faulty_pass_over_the_global_program() -> None:
    planted: list[str] = []
    compiled = compile_tiny(faulty=Faulty(lambda program: planted.append(_folded_scaling(program))), after=FoldNoOps)
    report = verified(compiled)
    assert not report and report.first_difference is not None and report.loss_error < 1e-12
    assert (report.first_difference.node, report.first_difference.made_by) == (planted[0], "faulty"), str(report)
    assert "compiled.py:" in report.first_difference.source and report.gradient_errors["head.weight"] > 0.1


def test_verify_names_a_site_that_draws_twice() -> None:
    planted: list[str] = []
    compiled = compile_tiny(0.5, Faulty(lambda program: planted.append(_same_site_twice(program))), MergeEqualCalls)
    report = verified(compiled, 0.5)
    assert not report and report.reference == "forward program" and report.first_difference is not None
    assert (report.first_difference.node, report.first_difference.made_by) == (planted[0], "faulty"), str(report)


def test_dropout_itself_is_verified() -> None:
    assert verified(compile_tiny(0.5), 0.5)


# --- faults at run time: the programs agree, the module's own run does not


def parallel(compiled: Compiled) -> ParallelModule:
    return ParallelModule(model(), MESH, capture=lambda args, kwargs, *, pins, shares: compiled, backend="eager")


def test_verify_names_the_rank_with_a_stale_parameter(tiny: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    module = parallel(tiny)
    assert verify(module, (), dict(batch()), promote=True)
    honest = VirtualWorld.parameter_parts
    old = model().up.weight.detach().double() * 0.9

    def stale(self: VirtualWorld, parameter: torch.Tensor, item: Any, mesh: Any) -> Any:
        parts = honest(self, parameter, item, mesh)
        return parts | {3: honest(self, old, item, mesh)[3]} if item.name == "up.weight" else parts

    monkeypatch.setattr(VirtualWorld, "parameter_parts", stale)
    report = verify(module, (), dict(batch()), promote=True)
    assert not report and report.first_difference is not None and report.first_difference.made_by == "runtime"
    assert report.first_difference.detail == "rank 3 holds another value of parameter 'up.weight'"


def test_verify_names_what_a_broken_backend_computes(tiny: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that compiles one op wrongly."""

    def broken(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is aten.relu.default:
                node.target = aten.abs.default
        module.recompile()
        return module.forward

    module = ParallelModule(model(), MESH, capture=lambda args, kwargs, *, pins, shares: tiny, backend=broken)
    report = verify(module, (), dict(batch()), promote=True)
    assert not report and report.first_difference is not None and report.first_difference.made_by == "runtime"
    relu = first(tiny.program, lambda node: node.target is aten.relu.default)
    assert report.first_difference.node == relu.name, str(report)
    # Against what is large in the same phase: of what cancels to zero the rounding alone is twice as large as it.
    monkeypatch.setattr(Scales, "floor_of", lambda self, node, value: math.inf)
    report = verify(module, (), dict(batch()), promote=True)
    assert not report and report.first_difference is not None and report.first_difference.node == "(no single node)", str(report)
