"""Runs the programs of one compile on the same call, node by node: the original model, FORWARD, GLOBAL, LOCAL on every rank.

Nothing here is fast or clever. The interpreter of schedules and the backends are not used, so that a fault in them
shows as a difference from what runs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.fx import Interpreter, Node

from autopar._torch import pytree
from autopar.frontend.traced import as_traced
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.graph.synced_norms import norms_of_the_batch
from autopar.ir.arguments import arguments, call_of, list_at
from autopar.ir.collectives import all_gather, all_reduce, all_to_all, is_launch, reduce_scatter
from autopar.ir.instructions import Collective, Launch
from autopar.ir.keys import ORIGIN
from autopar.ir.padding import unpadded
from autopar.ir.program import Form, Input, Program, Signature
from autopar.runtime._torch import flatten, starts_backward
from autopar.runtime.execute.virtual import collect
from autopar.runtime.execute.world import RankParts
from autopar.runtime.module.parameters import assemble, local_shard, replica_difference
from autopar.runtime.verify.limits import floor_of
from autopar.runtime.verify.report import norm

# Per rank what a node of a LOCAL program yields, called in the order of the graph.
Observer = Callable[[Node, Sequence[Any]], None]


@dataclass(frozen=True)
class Case:
    """One call: parameters and buffers by every name they have, the flat leaves of the inputs, the random key, the tangents by output.

    `first_names` gives the first name of a tied parameter; gradients go by it.
    """

    state: Mapping[str, torch.Tensor]
    leaves: Sequence[Any]
    first_names: Mapping[str, str]
    key: int = 0
    tangents: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def value(self, item: Input, program: Program) -> torch.Tensor:
        """The value of one input of `program`, whole, with the padding that it enters `program` with, laid out as it was traced."""
        if item.kind in ("parameter", "buffer"):
            return item.entering(self.state[item.name].detach().contiguous())
        if item.kind == "batch":
            return item.entering(self.leaves[int(item.name)].detach().contiguous())
        if item.kind == "constant":
            return program.constants[item.name]
        if item.kind == "random_key":
            return torch.tensor(self.key, dtype=torch.int64)
        assert item.kind == "tangent", item
        tangent = self.tangents.get(item.name)
        return item.entering(torch.ones(item.shape, dtype=item.dtype) if tangent is None else tangent.to(item.dtype))


@dataclass(frozen=True)
class Results:
    """What one program yields: outputs (the loss among them) by flat index, gradients and changed buffers by name.

    `replica_errors`: by result, the largest difference between ranks that should hold the same part.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    replica_errors: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def has_numbers(self) -> bool:
        """Whether an output holds a finite number, or all gradients do (those of a loss that ignores all labels are zero, and it NaN)."""
        return (
            not self.outputs
            or not all(map(_has_none, self.outputs.values()))
            or (bool(self.gradients) and not any(map(_has_none, self.gradients.values())))
        )

    def without_numbers(self, signature: Signature) -> tuple[str, ...]:
        """The outputs and gradients that hold no finite number."""
        losses = {item.name for item in signature.outputs_of("loss")}
        outputs = ("the loss" if name in losses else f"output {name}" for name, value in self.outputs.items() if _has_none(value))
        return (*outputs, *(f"the gradient of {name}" for name, value in self.gradients.items() if _has_none(value)))


def _has_none(value: torch.Tensor) -> bool:
    return value.numel() > 0 and not bool(value.isfinite().any())


def tangents_of(signature: Signature) -> dict[str, torch.Tensor]:
    """A random tangent for each output that is no loss, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    trained = [item for item in signature.outputs_of("output") if item.requires_grad]
    return {item.name: torch.randn(item.shape, generator=generator, dtype=torch.float64).to(item.dtype) for item in trained}


def run_original(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature, case: Case, training: bool
) -> Results:
    """`model` itself on the global batch, by autograd. It is changed: buffers are. `signature` is that of FORWARD."""
    with torch.set_grad_enabled(training), torch.random.fork_rng(devices=[]), norms_of_the_batch(model):
        leaves, _ = flatten(as_traced(lambda: model(*args, **kwargs)))
    outputs = {item.name: leaves[int(item.name)] for item in signature.outputs if item.kind in ("loss", "output")}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = ((name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad)
    changed = _changed(dict((*model.named_buffers(), *frozen)), case)
    gradients = _gradients(_differentiated(outputs, signature), parameters, case) if training else {}
    return Results(_detached(outputs), gradients, changed)


def run_forward(program: Program, case: Case, training: bool) -> Results:
    """A FORWARD program on one device, by autograd."""
    parameters, buffers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    values = []
    for item in program.signature.inputs:
        value = case.value(item, program).clone()
        if item.kind == "buffer":
            buffers[item.name] = value
        if item.kind == "parameter" and item.requires_grad and training:
            parameters[case.first_names[item.name]] = value.requires_grad_()
        values.append(value)
    with torch.set_grad_enabled(training):
        results = _Autograd(program).run(*values)
    named = list(zip(program.signature.outputs, results, strict=True))
    outputs = {item.name: value for item, value in named if item.kind in ("loss", "output")}
    # A buffer changes in place, or its new value is a result.
    buffers |= {item.name: value for item, value in named if item.kind == "buffer"}
    gradients = _gradients(_differentiated(outputs, program.signature), parameters, case) if training else {}
    return Results(_detached(outputs), gradients, _changed(buffers, case))


class _Autograd(Interpreter):
    """By autograd, to which what an op of ours gives may be a view: it lets nobody write into that, so what is written is a copy."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module())
        self._written = {memory_of(written_by(node)).name for node in writers_of(program.graph)}

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if not str(n.target).startswith("autopar.") or self._written.isdisjoint((n.name, *(each.name for each in n.users))):
            return found
        return pytree.tree_map_only(torch.Tensor, torch.clone, found)


def _differentiated(outputs: Mapping[str, torch.Tensor], signature: Signature) -> dict[str, torch.Tensor]:
    wanted = {item.name for item in signature.outputs if item.requires_grad}
    return {name: value for name, value in outputs.items() if name in wanted}


def _changed(buffers: Mapping[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    """Of those that a program can read, which are dense."""
    dense = {name: value for name, value in buffers.items() if value.layout is torch.strided}
    return {name: value.detach().clone() for name, value in dense.items() if not torch.equal(value, case.state[name])}


def _gradients(outputs: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    """Gradients by name, dense; a parameter that no output depends on has none.

    They are read from `.grad`, for `checkpoint(use_reentrant=True)` forbids `torch.autograd.grad`.
    """
    differentiable = {name: each for name, each in outputs.items() if starts_backward(each)}
    if not differentiable or not parameters:
        return {}
    tangents = [case.tangents.get(name, torch.ones_like(value)).to(value.dtype) for name, value in differentiable.items()]
    for parameter in parameters.values():
        parameter.grad = None
    # Of tensors torch turns modes like `Promoting` off, and what a checkpoint runs again would be another model.
    torch.autograd.backward(list(map(get_gradient_edge, differentiable.values())), tangents)
    given = {name: parameter.grad.detach() for name, parameter in parameters.items() if parameter.grad is not None}
    return {name: gradient if gradient.layout is torch.strided else gradient.to_dense() for name, gradient in given.items()}


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in tensors.items()}


def run_global(program: Program, case: Case) -> Results:
    """A GLOBAL program on one device."""
    return Stepper(program, case, frozenset()).results()


def results_of(
    signature: Signature, values: Sequence[torch.Tensor], case: Case, replica_errors: Mapping[str, float] | None = None
) -> Results:
    """`values` in the order of `signature.outputs`, sorted by kind."""
    named = list(zip(signature.outputs, values, strict=True))
    return Results(
        {item.name: value for item, value in named if item.kind in ("loss", "output")},
        {case.first_names[item.name]: value for item, value in named if item.kind == "gradient"},
        {item.name: value for item, value in named if item.kind == "buffer"},
        replica_errors or {},
    )


class Stepper:
    """A FORWARD or GLOBAL program, run as far as its values are asked for, without autograd.

    Values are dropped after their last use; those in `watched` wait until they are asked for, once.
    """

    def __init__(self, program: Program, case: Case, watched: frozenset[str]) -> None:
        # A FORWARD program may write into what it is given.
        inputs = (case.value(item, program).clone() for item in program.signature.inputs)
        self._inputs = iter(inputs)
        self._program, self._case = program, case
        self._nodes: Iterator[Node] = iter(program.graph.nodes)
        self._values: dict[str, Any] = {}
        self._needed = Counter({node.name: len(node.users) + (node.name in watched) for node in program.graph.nodes})
        self._watched = set(watched)
        self._failure: ReferenceRunError | None = None

    def value(self, name: str) -> Any:
        """What node `name` yields; a watched value is dropped here when nothing else needs it. Raises `ReferenceRunError`, again and again
        where a node in front of it cannot run."""
        if self._failure is not None:
            raise self._failure
        while name not in self._values:
            self._step(next(self._nodes))
        value = self._values[name]
        if name in self._watched:
            self._watched.remove(name)
            self._used(name)
        return value

    def results(self) -> Results:
        """What a GLOBAL program yields; the rest of it runs now."""
        values = [unpadded(self.value(node.name), item.padding) for item, node in self._program.named_outputs()]
        return results_of(self._program.signature, values, self._case)

    def _step(self, node: Node) -> None:
        if node.op == "placeholder":
            self._values[node.name] = next(self._inputs)
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: self._values[operand.name])
            try:
                self._values[node.name] = _execute(node, args, kwargs)
            except ReferenceRunError as error:
                self._failure = error
                raise
            for operand in node.all_input_nodes:
                self._used(operand.name)

    def _used(self, name: str) -> None:
        self._needed[name] -= 1
        if self._needed[name] == 0:
            del self._values[name]


def run_local(program: Program, case: Case, observe: Observer = lambda node, values: None) -> Results:
    """A LOCAL program on every rank of its mesh, all ranks side by side; `observe` sees every value."""
    return assembled(program.signature, _run_places(program, case, observe, {}), case)


def run_separated(program: Program, case: Case, observe: Observer = lambda node, values: None) -> Results:
    """A LOCAL program whose microbatches take their own statistics, each from the buffers that the one before left.

    They run side by side nevertheless, for what is known ahead is summed over them: again and again, each time one more of them has what
    it is handed, if results other than buffers depend on that. Of buffers nothing is promised.
    """
    number, handed = program.mesh.num_microbatches, dict[str, list[torch.Tensor]]()
    for _ in range(number - 1 if _reads_what_it_is_handed(program) else 0):
        held = _run_places(program, case, lambda node, values: None, handed)
        before = handed
        new = {each.item.name: each.parts for each in held if each.item.kind == "buffer" and not each.item.is_once}
        handed = {name: [parts[max(place - 1, 0)] for place in range(program.mesh.size)] for name, parts in new.items()}
        if before and all(torch.equal(one, two) for name in handed for one, two in zip(handed[name], before[name], strict=True)):
            break
    return assembled(program.signature, _run_places(program, case, observe, handed), case)


def _reads_what_it_is_handed(program: Program) -> bool:
    """Whether anything but buffers is made of the buffers that change."""
    changed = {item.name for item in program.signature.outputs_of("buffer") if not item.is_once}
    reached = {node for item, node in program.named_inputs() if item.kind == "buffer" and item.name in changed}
    for node in program.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return any(node in reached for item, node in program.named_outputs() if item.kind != "buffer")


def _run_places(program: Program, case: Case, observe: Observer, handed: Mapping[str, Sequence[torch.Tensor]]) -> list[RankParts]:
    """What every rank and microbatch holds of each result. `handed` are buffers by place: microbatches but the first begin with these."""
    assert program.form is Form.LOCAL
    mesh = program.mesh
    inputs = iter(program.signature.inputs)
    values: dict[Node, list[Any]] = {}
    needed = {node: len(node.users) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            item = next(inputs)
            values[node] = _shards(item, program, case)
            if item.kind == "buffer" and item.name in handed:
                given = enumerate(zip(values[node], handed[item.name], strict=True))
                values[node] = [left if place % mesh.num_microbatches else first for place, (first, left) in given]
        elif is_launch(node):
            values[node] = _collect(node, values[node.args[0]], program)
        else:
            values[node] = [_call(node, values, rank) for rank in range(mesh.size)]
        observe(node, values[node])
        for operand in node.all_input_nodes:
            needed[operand] -= 1
            if not needed[operand]:
                del values[operand]
    return [RankParts(dict(enumerate(values[node])), item, mesh) for item, node in program.named_outputs()]


def assembled(signature: Signature, results: Sequence[RankParts], case: Case) -> Results:
    """The results of a LOCAL program from what every rank holds of each, and how far replicas are apart."""
    found, gaps = [], dict[str, float]()
    for parts, item, mesh in results:
        assert item.sharding is not None, item
        found.append(unpadded(assemble(parts, item.dims, item.sharding, mesh), item.padding))
        gaps[f"{item.kind} {item.name}"] = replica_difference(parts, item.sharding, mesh)[0]
    largest = max((norm(value) for value in found), default=0.0)
    scales = [max(norm(value), floor_of(value.dtype) * largest) for value in found]
    scaled = {name: gap / scale if gap else 0.0 for (name, gap), scale in zip(gaps.items(), scales, strict=True)}
    return results_of(signature, found, case, scaled)


def _shards(item: Input, program: Program, case: Case) -> list[torch.Tensor]:
    mesh = program.mesh
    if item.kind == "coordinate":
        return [torch.tensor(mesh.index(rank, item.name.split(","))) for rank in range(mesh.size)]
    assert item.sharding is not None, item
    value = case.value(item, program)
    return [local_shard(value, item.dims, item.sharding, mesh, rank) for rank in range(mesh.size)]


def _call(node: Node, values: Mapping[Node, Sequence[Any]], rank: int) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: values[operand][rank])
    return _execute(node, args, kwargs)


class ReferenceRunError(Exception):
    """A node that cannot run; what it raised is the cause."""

    def __init__(self, node: Node, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.node = node


def _execute(node: Node, args: Any, kwargs: Any) -> Any:
    """One call, on the CPU wherever the program is to run."""
    if "device" in kwargs:
        kwargs = dict(kwargs) | {"device": torch.device("cpu")}
    try:
        with torch.no_grad():
            return _viewed(*args) if node.target is torch.ops.aten.view.default else call_of(node)(*args, **kwargs)
    except Exception as error:  # whatever an op raises is the finding
        raise ReferenceRunError(node, error) from error


_COLLECTIVES: dict[object, Collective] = {
    all_reduce: "all_reduce",
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
}


def _collect(node: Node, parts: Sequence[torch.Tensor], program: Program) -> list[torch.Tensor]:
    axes = tuple(str(axis) for axis in list_at(node, 1))
    reduces = node.target in (all_reduce, reduce_scatter)
    launch = Launch(_COLLECTIVES[node.target], arguments(node)[2] if reduces else "copy", axes, ("",), (node.name,))
    found: list[torch.Tensor | None] = [None] * program.mesh.size
    for rank in range(program.mesh.size):
        if found[rank] is None:
            members = program.mesh.group(rank, axes)
            for member, result in zip(members, collect(launch, [parts[member] for member in members]), strict=True):
                found[member] = result
    return [result for result in found if result is not None]


def origins(program: Program) -> frozenset[str]:
    """The GLOBAL nodes that a LOCAL program holds parts of."""
    return frozenset(ORIGIN[node] for node in program.graph.nodes if node in ORIGIN)


def _viewed(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A view; a copy where there cannot be one. Torch traces some ops (the backward of elu, hardswish, mse_loss) with other strides than
    their kernels give, and so with views that these have not."""
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.reshape(shape)
