"""Faults planted into a compiled program, one at a time: each is named by the check (static) or by verify (numeric).

The model is small enough to read: an embedding, a norm, two layers split by column and by row, a head split over the
vocabulary, and cross entropy over labels of which the ranks have unequal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional as F

from autopar._torch import fake_mode
from autopar.capture import capture
from autopar.check import violations
from autopar.check_schedule import check_schedule
from autopar.cluster import Cluster
from autopar.collectives import all_gather, all_reduce, is_launch, reduce_scatter, reshard, wait
from autopar.compiled import Compiled
from autopar.compiler import Options, default_passes
from autopar.emit import Emitter
from autopar.keys import DIMS, ORIGIN, SHARDING, STRATEGY
from autopar.manager import History, run_passes
from autopar.mesh import virtual_mesh
from autopar.passes.cut_fragments import cut_fragments
from autopar.passes.decompose_losses import DecomposeLosses
from autopar.passes.fold_no_ops import FoldNoOps
from autopar.passes.merge_equal_calls import MergeEqualCalls
from autopar.pins import Pins
from autopar.program import Form, Program, operands
from autopar.runtime.chain import verify_compiled
from autopar.runtime.module import ParallelModule
from autopar.runtime.report import Report
from autopar.runtime.verify import verify
from autopar.runtime.world import VirtualWorld
from autopar.schedule import Free, Instruction, Launch, Run, Schedule, Wait
from autopar.sharding import Sharding

aten = torch.ops.aten
MESH = virtual_mesh(dp=2, tp=2)
MEGATRON: Pins = {"e.weight": ("tp", None), "up.weight": ("tp", None), "down.weight": (None, "tp"), "head.weight": ("tp", None)}


class Tiny(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.e, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        self.first, self.second = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.e(ids))
        x = x + self.second(self.down(torch.relu(self.up(self.norm(x)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def batch() -> Mapping[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (8, 4), generator=generator)
    labels = torch.randint(0, 16, (8, 4), generator=generator)
    labels[:3] = -100
    return {"ids": ids, "labels": labels}


@cache
def model(dropout: float = 0.0) -> Tiny:
    torch.manual_seed(0)
    tiny = Tiny(dropout)
    for parameter in tiny.parameters():  # ones and zeros would hide what is permuted
        nn.init.uniform_(parameter, -0.8, 0.8)
    return tiny


def compile_tiny(dropout: float = 0.0, faulty: Any = None, after: type | None = None) -> Compiled:
    """`model(dropout)` on MESH; the pass `faulty` runs right after the one of type `after`."""
    history = History()
    passes: list[Any] = []
    for each in default_passes(Options(Cluster.ideal(), pins=MEGATRON), True, None):
        passes += [each, faulty] if after is not None and isinstance(each, after) else [each]
    local = run_passes(capture(model(dropout), (), dict(batch()), MESH), passes, [history])
    last = {step.program.form: step.program for step in history.steps}
    return Compiled(last[Form.FORWARD], last[Form.GLOBAL], local, cut_fragments(local), steps=tuple(history.steps))


@pytest.fixture(scope="module")
def tiny() -> Compiled:
    return compile_tiny()


def verified(compiled: Compiled, dropout: float = 0.0) -> Report:
    return verify_compiled(model(dropout), compiled, (), dict(batch()), promote=True, key=1234567890123)


def test_nothing_is_found_where_nothing_was_planted(tiny: Compiled) -> None:
    assert violations(tiny.program) == [] and violations(tiny.local, origin=tiny.program) == []
    assert check_schedule(dict.fromkeys(range(4), tiny.schedule), tiny.local.mesh) == []
    assert verified(tiny)


# --- helpers for planting


def first(program: Program, wanted: Callable[[Node], bool]) -> Node:
    return next(node for node in program.graph.nodes if node.op == "call_function" and wanted(node))


def consumer(node: Node) -> Node:
    return next(iter(node.users))


def revalue(program: Program) -> None:
    """Recompute all values, as a pass would that believes in what it does."""
    with fake_mode() as mode, torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                node.meta["val"] = torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
    assert mode is not None


def emit_between(value: Node, user: Node, make: Callable[[Emitter, Node], Node]) -> Node:
    """What `make` emits takes the place of `value` in `user`."""
    made = make(Emitter(user.graph, before=user, like=value), value)
    user.replace_input_with(value, made)
    return made


def reduced_over(node: Node, axis: str) -> bool:
    return node.target is all_reduce and axis in node.args[1] and node.meta["val"].is_floating_point()


# --- faults in the GLOBAL program: the check names the node


def _unreduced_into_relu(program: Program) -> Node:
    """The row-split product is a sum over tp still to be made; the reshard that makes it is left out."""
    node = first(program, lambda node: node.target is reshard and any(axis == "tp" for axis, _ in SHARDING[operands(node)[0]][0].unreduced))
    user = consumer(node)
    user.replace_input_with(node, operands(node)[0])
    return user


def _lost_token_count(program: Program) -> Node:
    """Each dp rank divides by its own number of labels."""
    division = first(program, lambda node: node.target is aten.div.Tensor)
    count = operands(division)[1]
    division.replace_input_with(count, operands(count)[0])
    return division


def _unreduced_loss(program: Program) -> Node:
    total = operands(operands(program.results[0])[0])[0]
    assert SHARDING[total][0].unreduced
    end = program.graph.output_node()
    end.args = ((total, *end.args[0][1:]),)
    return total


def _gradient_unlike_its_parameter(program: Program) -> Node:
    index, gradient = next((i, node) for i, (item, node) in enumerate(program.named_outputs()) if item.name == "up.weight")
    end, whole = program.graph.output_node(), Sharding.replicated(DIMS[gradient][0])
    with program.graph.inserting_before(end):
        gathered = program.graph.call_function(reshard, (gradient, whole))
    gathered.meta = dict(gradient.meta)
    gathered.meta.pop(STRATEGY, None)
    SHARDING[gathered] = (whole,)
    end.args = ((*end.args[0][:index], gathered, *end.args[0][index + 1 :]),)
    return gathered


def _axis_used_twice(program: Program) -> Node:
    node = first(program, lambda node: node.target is aten.relu.default)
    SHARDING[node] = (Sharding((("dp",), (), ("dp",))),)
    return node


def _claimed_linear(program: Program) -> Node:
    """A strategy under which relu would pass a sum still to be made."""
    node = first(program, lambda node: node.target is aten.relu.default)
    summed = Sharding(tuple(() for _ in SHARDING[node][0].splits), (("tp", "sum"),))
    STRATEGY[node] = replace(STRATEGY[node], operands=(summed,), results=(summed,))
    SHARDING[node] = (summed,)
    return node


def _made_unreduced(program: Program) -> Node:
    node = first(program, lambda node: node.target is reshard)
    SHARDING[node] = (replace(Sharding.replicated(DIMS[node][0]), unreduced=(("tp", "sum"),)),)
    return node


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_unreduced_into_relu, "arrives unreduced (sum over tp)"),
        (_lost_token_count, "operand 1 arrives unreduced (sum over dp"),
        (_unreduced_loss, "the loss is not replicated"),
        (_gradient_unlike_its_parameter, "the gradient of 'up.weight' is not sharded as 'up.weight' is"),
        (_axis_used_twice, "axis 'dp' is used 2 times"),
        (_claimed_linear, "the op's rule does not allow its strategy"),
        (_made_unreduced, "the reshard makes a value unreduced"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_the_check_names_faults_in_the_global_program(tiny: Compiled, plant: Callable[[Program], Node], message: str) -> None:
    program = tiny.program.copy()
    node = plant(program)
    found = [violation for violation in violations(program) if message in violation.what]
    assert found, "\n".join(map(str, violations(program)))
    assert found[0].where.startswith(f"%{node.name}")


# --- faults in the LOCAL program that the check names


def _doubled_all_reduce(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    emit = Emitter(program.graph, before=completed.next, like=completed)
    again = emit.call(all_reduce, completed, ("dp",), "sum")
    twice = emit.call(wait, again)
    completed.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not again)
    for key in (ORIGIN, DIMS, SHARDING):
        key[twice] = key[completed]
        del completed.meta[key]
    return again.name


def _wrong_axis(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp") and node.args[1] == ("dp",))
    launch.args = (launch.args[0], ("tp",), "sum")
    return launch.name


def _wrong_kind(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp") and node.args[2] == "sum")
    launch.args = (*launch.args[:2], "max")
    return launch.name


def _unknown_axis(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    launch.args = (launch.args[0], ("ep",), "sum")
    return launch.name


def _wrong_number_of_ranks(program: Program) -> str:
    launch = _gathered(program)
    launch.args = (*launch.args[:2], 4)
    return launch.name


def _off_by_one(program: Program) -> str:
    """A literal shape that was not made local: the arange over the vocabulary counts one too many."""
    node = first(program, lambda node: node.target is aten.arange.default and node.meta["val"].numel() == 8)
    node.args = (9, *node.args[1:])
    with fake_mode():
        node.meta["val"] = torch.empty(9, dtype=torch.int64)
    return consumer(node).name


def _literal_left_logical(program: Program) -> str:
    """An expand to the logical shape."""
    node = first(program, lambda node: node.target is aten.expand.default and node in SHARDING and bool(SHARDING[node][0].axes))
    shape = [math.prod(dim) for dim in DIMS[node][0]]
    node.args = (node.args[0], shape)
    with fake_mode():
        node.meta["val"] = torch.empty(shape)
    return node.name


def _missing_wait(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    user = consumer(completed)
    user.replace_input_with(completed, launch)
    return user.name


def _double_wait(program: Program) -> str:
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed = consumer(launch)
    emit_between(completed, consumer(completed), lambda emit, value: emit.call(wait, launch))
    return launch.name


def _wrong_dtype(program: Program) -> str:
    """Half the bytes on the wire, in a dtype that the receiver does not expect."""
    launch = first(program, lambda node: reduced_over(node, "dp"))
    emit_between(launch.args[0], launch, lambda emit, value: emit.cast(value, torch.bfloat16))
    return launch.name


def _other_operand(program: Program) -> str:
    """A residual branch reads the value before the norm where it should read the one after."""
    node = first(program, lambda node: node.target is aten.relu.default)
    other = first(program, lambda each: each.target is aten.mm.default and each.meta["val"].shape == node.meta["val"].flatten(0, 1).shape)
    emit_between(operands(node)[0], node, lambda emit, value: emit.call(aten.reshape.default, other, list(node.meta["val"].shape)))
    return node.name


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_doubled_all_reduce, "a doubled reduction, or the wrong axis"),
        (_wrong_axis, "a doubled reduction, or the wrong axis"),
        (_wrong_kind, "reduces by the wrong kind"),
        (_unknown_axis, "unknown axis 'ep'"),
        (_wrong_number_of_ranks, "gathers from the wrong number of ranks"),
        (_off_by_one, "not what its op computes"),
        (_literal_left_logical, "the local shape is not this rank's part of"),
        (_missing_wait, "used before its wait"),
        (_double_wait, "exactly one wait"),
        (_wrong_dtype, "not what its op computes"),
        (_other_operand, "does not read"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_the_check_names_faults_in_the_local_program(tiny: Compiled, plant: Callable[[Program], str], message: str) -> None:
    program = tiny.local.copy()
    name = plant(program)
    found = [violation for violation in violations(program, origin=tiny.program) if message in violation.what]
    assert any(violation.where.startswith(f"%{name} ") for violation in found), "\n".join(
        map(str, violations(program, origin=tiny.program))
    )


def test_the_check_names_a_dropped_all_reduce(tiny: Compiled) -> None:
    program = tiny.local.copy()
    launch = first(program, lambda node: reduced_over(node, "dp"))
    completed, source = consumer(launch), operands(launch)[0]
    name = ORIGIN[completed]
    completed.replace_all_uses_with(source)
    program.graph.erase_node(completed)
    program.graph.erase_node(launch)
    text = "\n".join(str(violation) for violation in violations(program, origin=tiny.program))
    assert "dropped" in text and f"%{name} " in text


# --- faults in the LOCAL program that only values show: verify names node, line and pass


def _gathered(program: Program) -> Node:
    return first(program, lambda node: node.target is all_gather and node.meta["val"].is_floating_point())


def _wrong_coordinate(program: Program) -> str:
    """Every tp rank masks the vocabulary as if it were the first."""
    coordinate = next(node for item, node in program.named_inputs() if item.kind == "coordinate" and item.name == "tp")
    node = first(program, lambda node: node.target is aten.mul.Tensor and coordinate in operands(node))
    node.args = (node.args[0], 0)
    return _origin(node)


def _wrong_gather_order(program: Program) -> str:
    launch = _gathered(program)
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
    report = verified(replace(tiny, local=program))
    assert not report and report.first_difference is not None
    assert (report.first_difference.node, report.first_difference.made_by) == (name, "lower"), str(report)
    assert "test_planted_faults.py:" in report.first_difference.source


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
    report = verified(replace(tiny, local=program))
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


def test_verify_names_a_faulty_forward_pass() -> None:
    report = verified(compile_tiny(faulty=Faulty(_mean_over_all_labels), after=DecomposeLosses))
    assert not report and report.first_difference is not None and report.loss_error > 0.1
    assert report.first_difference.made_by == "faulty" and report.first_difference.node.startswith("div"), str(report)


def test_verify_names_a_faulty_pass_over_the_global_program() -> None:
    planted: list[str] = []
    compiled = compile_tiny(faulty=Faulty(lambda program: planted.append(_folded_scaling(program))), after=FoldNoOps)
    report = verified(compiled)
    assert not report and report.first_difference is not None and report.loss_error < 1e-12
    assert (report.first_difference.node, report.first_difference.made_by) == (planted[0], "faulty"), str(report)
    assert "in" in report.first_difference.source and report.gradient_errors["head.weight"] > 0.1


def test_verify_names_a_site_that_draws_twice() -> None:
    planted: list[str] = []
    compiled = compile_tiny(0.5, Faulty(lambda program: planted.append(_same_site_twice(program))), MergeEqualCalls)
    report = verified(compiled, 0.5)
    assert not report and report.reference == "forward program" and report.first_difference is not None
    assert (report.first_difference.node, report.first_difference.made_by) == (planted[0], "faulty"), str(report)


def test_dropout_itself_is_verified() -> None:
    assert verified(compile_tiny(0.5), 0.5)


# --- faults in schedules: the check names rank and instruction


def _where(schedule: Schedule, wanted: type, nth: int = 0) -> int:
    return [number for number, each in enumerate(schedule.instructions) if isinstance(each, wanted)][nth]


def _with(schedule: Schedule, *changes: tuple[int, tuple[Instruction, ...]]) -> Schedule:
    """The instructions at these numbers replaced, the last first."""
    instructions = list(schedule.instructions)
    for number, by in sorted(changes, reverse=True):
        instructions[number : number + 1] = by
    return replace(schedule, instructions=tuple(instructions))


def _without_a_wait(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Wait)
    return _with(schedule, (number, ())), "is read before its collective is complete"


def _waits_twice(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Wait)
    return _with(schedule, (number, (schedule.instructions[number],) * 2)), "WAIT without a LAUNCH"


def _reads_after_free(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Run, 2)
    freed = next(name for name in schedule.instructions[number].inputs if name not in schedule.inputs)
    return _with(schedule, (number, (Free((freed,)), schedule.instructions[number]))), "is read after it was freed"


def _frees_in_flight(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Launch)
    launch = schedule.instructions[number]
    return _with(schedule, (number, (launch, Free((launch.source,))))), "is freed while a collective uses it"


def _frees_twice(schedule: Schedule) -> tuple[Schedule, str]:
    number = _where(schedule, Free)
    return _with(schedule, (number, (schedule.instructions[number],) * 2)), "is freed twice"


def _leaks(schedule: Schedule) -> tuple[Schedule, str]:
    return _with(schedule, (_where(schedule, Free), ())), "buffers are never freed"


@pytest.mark.parametrize(
    "plant",
    [_without_a_wait, _waits_twice, _reads_after_free, _frees_in_flight, _frees_twice, _leaks],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_the_check_names_faults_on_one_rank(tiny: Compiled, plant: Callable[[Schedule], tuple[Schedule, str]]) -> None:
    broken, message = plant(tiny.schedule)
    found = check_schedule({0: tiny.schedule, 1: tiny.schedule, 2: broken, 3: tiny.schedule}, MESH)
    named = [violation for violation in found if message in violation.what]
    assert named and named[0].where.startswith("rank 2,"), "\n".join(map(str, found))


def _independent_launches(schedule: Schedule) -> tuple[int, int]:
    """Two launches over one axis that stand next to each other."""
    numbers = [number for number, each in enumerate(schedule.instructions) if isinstance(each, Launch)]
    return next((a, b) for a, b in zip(numbers, numbers[1:], strict=False) if b == a + 1)


def test_the_check_names_a_swapped_collective_order(tiny: Compiled) -> None:
    one, other = _independent_launches(tiny.schedule)
    instructions = list(tiny.schedule.instructions)
    instructions[one], instructions[other] = instructions[other], instructions[one]
    swapped = replace(tiny.schedule, instructions=tuple(instructions))
    found = check_schedule({0: tiny.schedule, 1: swapped, 2: tiny.schedule, 3: tiny.schedule}, MESH)
    assert found and all("rank 1" in str(violation) for violation in found)


def test_the_check_names_ranks_that_disagree_on_a_dtype(tiny: Compiled) -> None:
    """What gloo turns into garbage without a word."""
    launch = tiny.schedule.instructions[_where(tiny.schedule, Launch)]
    shapes = dict(tiny.schedule.shapes)
    shapes |= {name: (shapes[name][0], torch.float16) for name in (launch.source, launch.target)}
    found = check_schedule({0: tiny.schedule, 1: replace(tiny.schedule, shapes=shapes), 2: tiny.schedule, 3: tiny.schedule}, MESH)
    named = [violation for violation in found if violation.what == "two ranks of a group launch different collectives"]
    assert named and "rank 1" in str(named[0]) and "f16" in str(named[0])


# --- faults at run time: the programs agree, the module's own run does not


def parallel(compiled: Compiled) -> ParallelModule:
    return ParallelModule(model(), MESH, capture=lambda args, kwargs, *, pins: compiled, backend="eager")


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


def test_verify_names_what_a_broken_backend_computes(tiny: Compiled) -> None:
    """A backend that compiles one op wrongly."""

    def broken(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is aten.relu.default:
                node.target = aten.abs.default
        module.recompile()
        return module.forward

    module = ParallelModule(model(), MESH, capture=lambda args, kwargs, *, pins: tiny, backend=broken)
    report = verify(module, (), dict(batch()), promote=True)
    assert not report and report.first_difference is not None and report.first_difference.made_by == "runtime"
    relu = first(tiny.program, lambda node: node.target is aten.relu.default)
    assert report.first_difference.node == relu.name, str(report)


def test_every_collective_of_the_program_is_one_that_faults_were_planted_in(tiny: Compiled) -> None:
    """The faults above reach for kinds of collectives: the plan must have them."""
    kinds = {node.target.__name__ for node in tiny.local.graph.nodes if is_launch(node)}
    assert {"all_reduce", "all_gather"} <= kinds
