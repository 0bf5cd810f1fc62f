"""Run programs of every form on real tensors, and compare what they yield."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import run_passes
from autopar.ir.actions import PipelineSchedule
from autopar.ir.keys import STAGE
from autopar.ir.mesh import Mesh
from autopar.ir.padding import unpadded
from autopar.ir.program import Form, Program
from autopar.ir.schedule import Schedule
from autopar.passes.global_.choose_microbatches import ChooseMicrobatches
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.refine_mesh import RefineMesh
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from autopar.passes.local.copy_to_stages import CopyToStages
from autopar.passes.local.lower import Lower
from autopar.pipeline.schedules import generate
from autopar.runtime.execute.fragments import CompiledFragments
from autopar.runtime.execute.interpreter import RankState, execute
from autopar.runtime.execute.virtual import Rendezvous, VirtualTransport, drive
from autopar.runtime.module.parameters import assemble, local_shard
from autopar.testing.random_shardings import RandomShardings
from tests.support.captures import kept_capture
from tests.support.schedules import scheduled

PP2 = Mesh((("pp", 2),))
# By kind and name, as in the signature.
Values = dict[tuple[str, str], Tensor]
KEY = 0x1234_5678_9ABC_DEF

_PASSES = default_passes(Options(Cluster.ideal()), training=True)
# What the compiler does before the trace: losses and random ops lowered, ops of our own written.
FORWARD_PASSES = _PASSES[: next(i for i, each in enumerate(_PASSES) if isinstance(each, TraceJoint))]
SIMPLIFICATIONS = (ViewsOfChunks(), FoldNoOps(), MergeEqualCalls())


def forward_program(model: nn.Module, kwargs: Mapping[str, Any], mesh: Mesh, *args: Any, **options: Any) -> Program:
    return kept_capture(model, args, dict(kwargs), mesh, **options)


def global_program(forward: Program, training: bool = True) -> Program:
    """Simplified, with atoms, on the refined mesh: what a search decides on."""
    return run_passes(forward, (TraceJoint(training), *SIMPLIFICATIONS, FindAtoms(), RefineMesh()))


def random_local(program: Program, seed: int) -> Program:
    """LOCAL by a random legal plan of a GLOBAL program that has atoms."""
    return run_passes(program, (RandomShardings(seed), InsertReshards(), Lower()))


def passed(
    model: nn.Module, args: tuple[Any, ...], last: type | None, mesh: Mesh = PP2, number: int = 2, order: PipelineSchedule | None = None
) -> Program:
    """The program of `model` after pass `last` (None: after all that rewrite graphs), on the ideal cluster, in order 1f1b or the given one.

    Where the model mixes samples, each microbatch has its own statistics.
    """
    mesh = mesh.with_microbatches(number)
    order = order or generate("1f1b", mesh.size_of(mesh.parts("pp")), number)
    passes = default_passes(Options(Cluster.ideal(), microbatch_statistics="own"), torch.is_grad_enabled())
    passes = [each for each in passes if not isinstance(each, ChooseMicrobatches)]  # there are so many from the start
    end = 1 + next(i for i, each in enumerate(passes) if isinstance(each, last or CopyToStages))
    captured = kept_capture(model, args, {}, mesh, None, dict.fromkeys(range(len(args)), 0))
    return run_passes(replace(captured, order=order), passes[:end])


def inputs_of(program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """The value of every input, whole; tangents are ones."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    found: Values = {}
    for item in program.signature.inputs:
        if item.kind in ("parameter", "buffer"):
            value = state[item.name].detach().clone()
        elif item.kind == "constant":
            value = program.constants[item.name]
        elif item.kind == "batch":
            value = leaves[int(item.name)]
        else:
            value = torch.tensor(KEY) if item.kind == "random_key" else torch.ones(item.shape, dtype=item.dtype)
        found[item.kind, item.name] = value
    return found


def run(program: Program, inputs: Values) -> Values:
    """A GLOBAL program on one device. Raises AssertionError where a value is not of the traced shape or dtype."""
    assert program.form is Form.GLOBAL
    values = (item.entering(inputs[item.kind, item.name].clone()) for item in program.signature.inputs)
    results = _Traced(program.module(), program).run(*values)
    return {(item.kind, item.name): unpadded(value, item.padding) for item, value in zip(program.signature.outputs, results, strict=True)}


def run_forward(program: Program, inputs: Values) -> Values:
    """A FORWARD program on one device, its gradients by autograd with tangents of one."""
    assert program.form is Form.FORWARD
    values = [inputs[item.kind, item.name].clone().requires_grad_(item.requires_grad) for item in program.signature.inputs]
    buffers = {item.name: value for item, value in zip(program.signature.inputs, values, strict=True) if item.kind == "buffer"}
    results = program.module()(*values)
    found: Values = {(item.kind, item.name): value.detach() for item, value in zip(program.signature.outputs, results, strict=True)}
    trainable = [(item.name, value) for item, value in zip(program.signature.inputs, values, strict=True) if item.requires_grad]
    total = sum((value.sum() for value in results if value.requires_grad), torch.zeros(()))
    if trainable and total.requires_grad:
        gradients = torch.autograd.grad(total, [value for _, value in trainable], allow_unused=True)
        found |= {("gradient", name): value for (name, _), value in zip(trainable, gradients, strict=True) if value is not None}
    assert all(("buffer", name) not in found or found["buffer", name].shape == value.shape for name, value in buffers.items())
    return found


def run_schedule(schedule: Schedule, mesh: Mesh, inputs: Values, check_replicas: bool = True) -> Values:
    """A schedule on virtual ranks, eager; outputs put together, replicas compared bit by bit."""
    rendezvous = Rendezvous(mesh)
    ranks = [_rank_inputs(schedule, mesh, inputs, rank) for rank in range(mesh.size)]
    transports = [VirtualTransport(rendezvous, rank) for rank in range(mesh.size)]
    fragments = CompiledFragments(schedule.fragments, "eager")
    with torch.no_grad():
        for _ in range(2):
            drive([execute(schedule, state, fragments, transport) for state, transport in zip(ranks, transports, strict=True)])
    rendezvous.check_empty()
    found: Values = {}
    for item, name in zip(schedule.signature.outputs, schedule.outputs, strict=True):
        parts = {rank: state.buffers[name] for rank, state in enumerate(ranks)}
        assert item.sharding is not None
        whole = assemble(parts, item.dims, item.sharding, mesh, check_replicas=check_replicas)
        found[item.kind, item.name] = unpadded(whole, item.padding)
    return found


def run_local(local: Program, inputs: Values) -> Values:
    return run_schedule(scheduled(local).places[0], local.mesh, inputs)


def _rank_inputs(schedule: Schedule, mesh: Mesh, inputs: Values, rank: int) -> RankState:
    buffers: dict[str, Tensor] = {}
    for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=True):
        if item.kind == "coordinate":
            buffers[name] = torch.tensor(mesh.index(rank, item.name.split(",")))
        elif item.sharding is None:
            buffers[name] = inputs[item.kind, item.name]
        else:
            whole = item.entering(inputs[item.kind, item.name])
            buffers[name] = local_shard(whole, item.dims, item.sharding, mesh, rank)
    return RankState(buffers)


class _Traced(torch.fx.Interpreter):
    """Compares every value with the fake one that was traced."""

    def __init__(self, module: torch.fx.GraphModule, program: Program) -> None:
        super().__init__(module)
        self.fakes = {node.name: node.meta.get("val") for node in program.graph.nodes}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        fake = self.fakes[n.name]
        if isinstance(value, Tensor) and isinstance(fake, Tensor):
            wanted, got = (fake.shape, fake.dtype), (value.shape, value.dtype)
            assert wanted == got, f"{n.format_node()}: traced {wanted}, ran {got}"
        return value


def errors_of(got: Values, wanted: Values) -> dict[tuple[str, str], float]:
    """‖a − b‖ / max(‖b‖, 1e-6 · ‖all gradients‖) for every output of `wanted`; a gradient may truly be zero."""
    assert got.keys() == wanted.keys()
    norm = torch.stack([value.double().norm() for (kind, _), value in wanted.items() if kind == "gradient"] or [torch.zeros(())]).norm()
    return {
        key: float((got[key].double() - value.double()).norm() / max(value.double().norm(), 1e-6 * norm, 1e-300))
        for key, value in wanted.items()
    }


def assert_close(got: Values, wanted: Values, tolerance: float) -> None:
    """Every output of `wanted` within `tolerance`, as `errors_of` measures it."""
    errors = errors_of(got, wanted)
    wrong = {key: error for key, error in errors.items() if not error <= tolerance}
    assert not wrong, f"{len(wrong)} of {len(errors)} outputs differ by more than {tolerance}: {dict(list(wrong.items())[:8])}"


def calls(program: Program, target: Any) -> list[Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and node.target == target]


def by_stage(program: Program, choose: Callable[[Node], bool] = lambda node: True) -> Mapping[int | None, list[str]]:
    """Names of the calls, by their stage."""
    found: dict[int | None, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and choose(node):
            found.setdefault(STAGE.get(node), []).append(node.name)
    return found
