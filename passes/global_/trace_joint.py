"""From FORWARD to GLOBAL: forward and backward as one functional ATen graph, by AOTAutograd.

Autograd derives every backward; nothing is rewritten twice. Forward nodes come first, then backward ones;
a node that only the backward needs (a transposed weight) is put there, so that nothing is saved for it.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.graph import CodeGen

from autopar._torch import DATA_DEPENDENT_ERRORS, FakeTensorMode, describe_input, describe_output, fake_mode_of, joint_graph, leaves_behind
from autopar.errors import AutoparError, CaptureError
from autopar.graph.decompositions import CALLED_INSTEAD, DECOMPOSITIONS
from autopar.graph.emit import Emitter, drop_records
from autopar.graph.late_code import code_written_late
from autopar.graph.layer_instances import with_all_layers, with_few_layers
from autopar.graph.layers import NotRepeatedError, run_of
from autopar.graph.overwrites import memory_of, sources_of, writers_of, writes, written_by
from autopar.ir.arguments import arguments
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.program import Form, Input, Output, Program
from autopar.ir.source import WRAPPED, set_sources

aten = torch.ops.aten
logger = logging.getLogger("autopar")

# So many characters of torch's own text.
_SHOWN = 400


@dataclass(frozen=True)
class TraceJoint:
    """Trace a FORWARD program into GLOBAL form.

    With `training` the trainable parameters get gradients (and non-loss outputs take tangents); without, the program
    is the forward alone. Parameters that the outputs do not depend on get no gradient.

    Reads: val. Writes: a new graph with val, PHASE, SOURCE. Ensures: form GLOBAL, functional ATen, forward before backward.
    """

    training: bool = True
    name: str = "trace joint"

    def apply(self, program: Program) -> Program:
        return trace_joint(program, self.training)


def trace_joint(program: Program, training: bool) -> Program:
    assert program.form is Form.FORWARD
    program = _with_own_memory(program) if training else program
    joint = _traced_by_layers(program, training) or _traced(program, training)
    _order_by_phase(joint)
    return _with_ways_back(joint, program) if len(joint.signature.inputs_of("tangent")) > 1 else joint


def _traced_by_layers(program: Program, training: bool) -> Program | None:
    """Of many equal layers a few are traced, and what that gives is written out for all; None where there are none."""
    run = run_of(program)
    try:
        return run and with_all_layers(_traced(with_few_layers(program, run), training), run, WRAPPED)
    except NotRepeatedError as why:
        logger.info("all layers are traced: %s", why)
        return None


def _traced(program: Program, training: bool) -> Program:
    """The joint graph in the order in which it was traced."""
    mode = fake_mode_of(program.placeholders[0].meta["val"])
    try:
        with code_written_late():
            graph, into, out = joint_graph(_Run(program.module()).run, _fakes(program, mode, training), mode, DECOMPOSITIONS)
    except DATA_DEPENDENT_ERRORS as error:
        raise _of_no_known_size(program) from error
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise _of_overwritten(program) from error
    graph.set_codegen(CodeGen())
    for target in _CHECKS:
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    _refuse_effects(graph)
    _refuse_draws(graph)
    _name_placeholders(graph, into, program)
    inputs = tuple(_input(descriptor, node, program) for descriptor, node in zip(into, graph.find_nodes(op="placeholder"), strict=True))
    results = arguments(graph.output_node())[0]
    pairs = [(_output(d, program), node) for d, node in zip(out, results, strict=True) if isinstance(node, Node)]
    graph.output_node().args = (tuple(node for _, node in pairs),)
    set_sources(graph, WRAPPED)
    drop_records(graph)
    return Program(
        graph,
        program.mesh,
        replace(program.signature, inputs=inputs, outputs=tuple(output for output, _ in pairs)),
        Form.GLOBAL,
        program.constants,
        program.freedom,
        order=program.order,
        autocast=program.autocast,
        precision=program.precision,
        reduce=program.reduce,
    )


def _of_no_known_size(program: Program) -> CaptureError:
    """Naming the writes by a mask, of which autograd gathers what was written."""
    masked = [node for node in program.graph.nodes if node.op == "call_function" and "index_put" in str(node.target)]
    lines = "".join(f"\n  {node.target} at {SOURCE.get(node) or '(no source line)'}" for node in masked)
    return CaptureError(
        f"the backward has a value whose size depends on data, as where a mask says which rows are written{lines and ':' + lines}\n"
        "  how to mend it: torch.where(mask, values, x) or x.masked_fill(mask, value) choose for each position by itself"
    )


def _of_overwritten(program: Program) -> CaptureError:
    """Naming all writes: torch does not say which of them it was."""
    places = dict.fromkeys(SOURCE[node].at for node in writers_of(program.graph) if node in SOURCE)
    lines = "".join(f"\n  {place}" for place in places)
    return CaptureError(
        "the backward needs a value into which forward writes once it was read. Written through .data or .detach(), as torch runs it, the "
        f"gradient is that of the new value, without a word. What is written in place:{lines}\n"
        "  how to mend it: make a new tensor: x = x.masked_fill(mask, 0.0), torch.where(mask, values, x), or x = x.clone() before the write"
    )


def _of_op(node: Node, error: Exception) -> CaptureError:
    """Where the model alone has done what its functional form cannot."""
    source, said = SOURCE.get(node), " ".join(str(error).split())
    in_place = (
        "make a new tensor in place of writing into this one: x = x.masked_fill(...) for x.masked_fill_(...), torch.where for x[i] = v"
    )
    return CaptureError(
        f"{node.target} fails where torch traces forward and backward as one functional graph: "
        f"{said if len(said) <= _SHOWN else said[:_SHOWN] + ' …'}\n  where: {'(no source line)' if source is None else source.at}\n"
        f"  how to mend it: {in_place if writes(node) else 'compute the same by other ops of torch on this line'}"
    )


def _fakes(program: Program, mode: FakeTensorMode, training: bool) -> list[torch.Tensor]:
    with mode:
        return [
            torch.empty(item.shape, dtype=item.dtype).requires_grad_(training and item.requires_grad) for item in program.signature.inputs
        ]


def _with_ways_back(joint: Program, forward: Program) -> Program:
    """Record for every gradient the outputs that it comes back through, as autograd sees it.

    Also where its value does not depend on the tangent (through `floor` it is zeros), so the graph alone cannot tell.
    """
    fakes = _fakes(forward, mode := fake_mode_of(forward.placeholders[0].meta["val"]), training=True)
    with mode, torch.enable_grad():
        results = _Run(forward.module()).run(*fakes)
    names = {id(fake): item.name for item, fake in zip(forward.signature.inputs, fakes, strict=True) if item.kind == "parameter"}
    ways: dict[str, list[str]] = {}
    for item, result in zip(forward.signature.outputs, results, strict=True):
        if item.requires_grad and result.requires_grad:
            for leaf in leaves_behind(result):
                ways.setdefault(names.get(id(leaf), ""), []).append(item.name)
    outputs = tuple(
        replace(item, through=tuple(ways.get(item.name, ()))) if item.kind == "gradient" else item for item in joint.signature.outputs
    )
    return replace(joint, signature=replace(joint.signature, outputs=outputs))


def _with_own_memory(program: Program) -> Program:
    """Copy outputs that share memory with an input or an earlier output: AOTAutograd gives these no tangent of their own."""
    program = program.copy()
    taken: set[Node] = set(program.placeholders)
    results = list(program.results)
    for index, (output, node) in enumerate(program.named_outputs()):
        memory = memory_of(node)
        if output.requires_grad and memory in taken:
            results[index] = Emitter(program.graph, program.graph.output_node(), node).call(aten.clone.default, node)
        taken.add(memory)
    program.graph.output_node().args = (tuple(results),)
    return program


class _Run(Interpreter):
    """Runs a FORWARD program, with functions of ours in place of ops whose decomposition in torch is wrong, or whose backward is one op."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # what is raised here says where

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(CALLED_INSTEAD.get(target, target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except (AutoparError, *DATA_DEPENDENT_ERRORS):
            raise
        except (RuntimeError, ValueError) as error:
            raise _of_op(n, error) from error


def _refuse_effects(graph: Graph) -> None:
    """Ops that print, say, are ordered by tokens, which are no values of the program."""
    found = [node.args[1] for node in graph.nodes if str(node.target) == "with_effects"]
    if found:
        names = ", ".join(dict.fromkeys(map(str, found)))
        raise CaptureError(f"{names} does something beside its results, in an order that ranks do not keep; leave it out of forward")


def _refuse_draws(graph: Graph) -> None:
    """`KeyRandom` has keyed every draw but those inside a `torch.autograd.Function`, which is a single call until here."""
    drawing = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if drawing:
        names = ", ".join(dict.fromkeys(str(node.target) for node in drawing))
        raise CaptureError(f"a torch.autograd.Function draws random numbers ({names}), which cannot be keyed; draw outside, pass them in")


def _name_placeholders(graph: Graph, into: list[Any], program: Program) -> None:
    for descriptor, node in zip(into, list(graph.find_nodes(op="placeholder")), strict=True):
        kind, index = describe_input(descriptor)
        node.name = program.placeholders[index].name if kind == "input" else f"{kind.replace(' ', '_')}_{index}"
        node.target = node.name


def _input(descriptor: Any, node: Node, program: Program) -> Input:
    signature = program.signature
    kind, index = describe_input(descriptor)
    if kind == "input":
        return signature.inputs[index]
    if kind == "mutation tangent":
        source = program.signature.inputs[index]
        if source.kind == "parameter":
            _refuse_write(program, index)
        raise CaptureError(
            f"the model writes a value that has a gradient into its {source.kind} {source.name!r}, where the next step would find it"
            f"{_written_at(program, index)}\n  how to mend it: write x.detach(), or write under torch.no_grad()"
        )
    value = node.meta["val"]
    return Input("tangent", signature.outputs[index].name, tuple(value.shape), value.dtype)


def _output(descriptor: Any, program: Program) -> Output:
    signature = program.signature
    kind, index = describe_output(descriptor)
    if kind == "output":
        return signature.outputs[index]
    source = signature.inputs[index]
    if kind == "mutation" and source.kind != "buffer":
        _refuse_write(program, index)
    return Output("gradient" if kind == "gradient" else "buffer", source.name, source.shape, source.dtype)


def _refuse_write(program: Program, index: int) -> NoReturn:
    source = program.signature.inputs[index]
    mend = "write out of place (x = x * 2 for x.mul_(2)), or make it a buffer"
    if source.kind == "parameter":
        mend = "change what trains outside of forward, after the optimizer's step; what does not (requires_grad_(False)) may be written"
    what = {"parameter": f"parameter {source.name!r}", "constant": "a tensor that it holds and that is no buffer"}
    raise CaptureError(
        f"the model writes into {what.get(source.kind, f'its {source.kind} input {source.name}')} in forward{_written_at(program, index)}\n"
        f"  how to mend it: {mend}"
    )


def _written_at(program: Program, index: int) -> str:
    """The line that writes into an input of a FORWARD program."""
    target = program.placeholders[index]
    places = (SOURCE[node] for node in writers_of(program.graph) if memory_of(written_by(node)) is target and node in SOURCE)
    place = next((place for place in places if place.file), None)
    return f"\n  where: {place.at}" if place else ""


def _order_by_phase(program: Program) -> None:
    """Set PHASE on every call and sort the graph: placeholders, forward, backward, output."""
    needed = sources_of(node for output, node in program.named_outputs() if output.kind != "gradient")
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    for node in calls:
        PHASE[node] = "forward" if node in needed else "backward"
        if node.target is operator.getitem:
            PHASE[node] = PHASE[node.all_input_nodes[0]]
    cursor = program.placeholders[-1]
    for phase in ("forward", "backward"):
        for node in calls:
            if PHASE[node] == phase:
                cursor.append(node)
                cursor = node


# Checks of values that the trace itself adds; those of the model are outputs by now. They are torch's decompositions' (that a class is one
# of those there are), and those of `torch.linalg` inside other functions (`matrix_power` to a negative one).
_CHECKS = (aten._assert_async.msg, aten._assert_async.default, aten._linalg_check_errors.default)
