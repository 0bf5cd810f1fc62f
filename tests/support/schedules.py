"""Schedules built by hand, for tests of the runtime without the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from autopar.checks.schedule import check_schedule
from autopar.checks.violation import report
from autopar.compiler import default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.compiled import Compiled
from autopar.driver.manager import run_passes
from autopar.driver.options import Options
from autopar.errors import ScheduleError
from autopar.ir.actions import SINGLE
from autopar.ir.instructions import parse
from autopar.ir.lifetimes import touched
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.schedule import Buffer, Fragment, Schedule, TensorType
from autopar.ir.sharding import Dims, Sharding
from autopar.passes.schedule.bucket_collectives import BucketCollectives
from autopar.passes.schedule.free_buffers import FreeBuffers
from autopar.passes.schedule.gather_ahead import GatherAhead
from autopar.passes.schedule.order_actions import OrderActions
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.runtime._torch import flatten
from autopar.runtime.module.parallel_module import ParallelModule

HIDDEN, BATCH, WIDTH = 8, 4, 6


def fragment(name: str, function: Callable[..., object]) -> Fragment:
    return Fragment(name, symbolic_trace(function) if not isinstance(function, GraphModule) else function)


def buffers_of(text: str, types: Mapping[str, TensorType]) -> dict[str, Buffer]:
    """What the names of a schedule written by hand stand for: `h@2` is h of microbatch 2, of h's type unless it has its own."""
    found: dict[str, Buffer] = {}
    for name in dict.fromkeys([*types, *(name for each in parse(text) for name in touched(each))]):
        value, _, number = name.partition("@")
        found[name] = Buffer(value, types.get(name) or types.get(value), int(number) if number else None)
    return found


def retyped(schedule: Schedule, types: Mapping[str, TensorType]) -> Schedule:
    """`schedule` with other shapes and dtypes of some buffers."""
    return replace(schedule, buffers={name: each._replace(type=types.get(name, each.type)) for name, each in schedule.buffers.items()})


def whole(mesh: Mesh, *schedules: Schedule) -> ScheduleProgram:
    """What the ranks at each place along `pp` execute, as a program."""
    return ScheduleProgram(mesh.ranks, SINGLE, schedules, is_executable=True)


def check_schedules(schedules: Sequence[Schedule], mesh: Mesh) -> None:
    """Raise `ScheduleError` naming everything that would go wrong when the ranks of `mesh` run `schedules`, one for each."""
    found = check_schedule(dict(enumerate(schedules)), mesh)
    if found:
        raise ScheduleError(report(found, f"schedule on {mesh}"))


def scheduled(local: Program, device: str = "cpu", joins: bool = True, last: type = FreeBuffers) -> ScheduleProgram:
    """What ranks execute of a LOCAL program after the pass `last`; with `joins` collectives go together where they can."""
    passes = default_passes(Options(Cluster.ideal(), device=device), training=True)
    first, end = (next(number for number, each in enumerate(passes) if isinstance(each, kind)) for kind in (OrderActions, last))
    unjoined = (BucketCollectives, GatherAhead)
    return run_passes(local, [each for each in passes[first : end + 1] if joins or not isinstance(each, unjoined)])


def schedule_of(
    text: str, inputs: str = "", outputs: str = "", signature: Signature | None = None, **functions: Callable[..., object]
) -> Schedule:
    fragments = {name: fragment(name, function) for name, function in functions.items()}
    buffers = buffers_of(text, {})
    return Schedule(parse(text), fragments, tuple(inputs.split()), tuple(outputs.split()), signature or Signature((), ()), buffers)


# The two-layer perceptron  loss = sum(relu(x W1ᵀ) W2ᵀ · y) / (batch · width), column- then row-split over tp, batch over dp.
MLP_TRAINING = """
RUN forward1 (w1, w2, x) -> (h, partial)
LAUNCH all_reduce sum tp (partial) -> out
FREE partial
WAIT out
RUN forward2 (out, y) -> (loss_partial)
LAUNCH all_reduce sum dp (loss_partial) -> loss
WAIT loss
PAUSE
RUN backward (w2, h, x, y, tangent) -> (g1_partial, g2_partial)
LAUNCH all_reduce sum dp (g1_partial) -> g1
LAUNCH all_reduce sum dp (g2_partial) -> g2
WAIT g1
WAIT g2
FREE g1_partial g2_partial h
"""
MLP_INFERENCE = MLP_TRAINING.split("PAUSE")[0]


def mlp_forward1(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.relu(x @ w1.t())
    return h, h @ w2.t()


def mlp_forward2(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    return ((out * y).sum() / (BATCH * WIDTH),)


def mlp_backward(
    w2: torch.Tensor, h: torch.Tensor, x: torch.Tensor, y: torch.Tensor, tangent: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    g_out = y * (tangent / (BATCH * WIDTH))
    g_h = (g_out @ w2) * (h > 0)
    return g_h.t() @ x, g_out.t() @ h


class Mlp(torch.nn.Module):
    """The model that the schedules above compute: returns {"loss", "out"}; `w1`'s hidden dim is the atoms (2, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.proj(torch.relu(self.fc(x)))
        return {"loss": (out * y).sum() / out.numel(), "out": out}


def mlp_signature(training: bool, structure: object, leaves: tuple[object, ...]) -> Signature:
    f32, batch = torch.float32, Sharding((("dp",), ()))
    hidden: Dims = ((2, HIDDEN // 2), (WIDTH,))
    back: Dims = ((WIDTH,), (2, HIDDEN // 2))
    column, row = Sharding(((), ("tp",), ())), Sharding(((), (), ("tp",)))
    scalar = Sharding(())
    inputs = [
        Input("parameter", "fc.weight", (HIDDEN, WIDTH), f32, True, hidden, column),
        Input("parameter", "proj.weight", (WIDTH, HIDDEN), f32, True, back, row),
        Input("batch", "0", (BATCH, WIDTH), f32, False, ((BATCH,), (WIDTH,)), batch),
        Input("batch", "1", (BATCH, WIDTH), f32, False, ((BATCH,), (WIDTH,)), batch),
    ]
    outputs = [Output("loss", "0", (), f32, True, (), scalar)]
    if training:
        inputs.append(Input("tangent", "0", (), f32, False, (), scalar))
        outputs.append(Output("gradient", "fc.weight", (HIDDEN, WIDTH), f32, False, hidden, column))
        outputs.append(Output("gradient", "proj.weight", (WIDTH, HIDDEN), f32, False, back, row))
    return Signature(tuple(inputs), tuple(outputs), structure, leaves)


def mlp_compiled(mesh: Mesh, training: bool = True) -> Compiled:
    """What the compiler would yield for `Mlp` on a dp × tp mesh."""
    from autopar.driver.compiled import TENSOR

    leaves, structure = flatten({"loss": 0, "out": 0})
    signature = mlp_signature(training, structure, tuple(TENSOR for _ in leaves))
    schedule = schedule_of(
        MLP_TRAINING if training else MLP_INFERENCE,
        "w1 w2 x y" + " tangent" * training,
        "loss" + " g1 g2" * training,
        signature,
        forward1=mlp_forward1,
        forward2=mlp_forward2,
        backward=mlp_backward,
    )
    program = Program(Graph(), mesh, signature, Form.LOCAL)
    return Compiled.of(program, program, program, whole(mesh, schedule))


def parallel_mlp(mesh: Mesh, **options: Any) -> tuple[ParallelModule, Mlp]:
    """The hand-compiled model on `mesh`, and a plain copy of it."""
    torch.manual_seed(0)
    model = Mlp()
    captures: list[Any] = []

    def capture(args: tuple[Any, ...], kwargs: dict[str, Any], *, pins: Any, shares: Any) -> Any:
        captures.append((args, kwargs, pins))
        return mlp_compiled(mesh, torch.is_grad_enabled())

    reference = copy.deepcopy(model)
    parallel = ParallelModule(model, mesh, capture=capture, backend=options.pop("backend", "eager"), **options)
    parallel.__dict__["captures_seen"] = captures
    return parallel, reference
