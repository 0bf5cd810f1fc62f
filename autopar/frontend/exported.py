"""From torch's `ExportedProgram` to a FORWARD program: one device-independent form.

Placeholders for parameters, buffers, constants and batch tensors in that order, what is under `no_grad` detached,
values faked on the CPU whatever device the model is on.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind
from torch.export.graph_signature import InputSpec
from torch.export.graph_signature import OutputKind as ExportedOutput
from torch.fx import Graph, GraphModule, Node

from autopar._torch import HigherOrderOperator, pytree, schema_of
from autopar.errors import CaptureError
from autopar.frontend._torch_export import GIVEN_BACK, REGION_MARKS
from autopar.frontend.asked_layouts import needless_copies_dropped
from autopar.frontend.attention_layout import copies_of_attention_kept
from autopar.frontend.custom_functions import function_at
from autopar.frontend.data_writes import data_writes_detached, other_data_copied, own_data_kept
from autopar.frontend.frozen_writes import written_as_buffers
from autopar.frontend.hooks import hooks_placed
from autopar.frontend.known_masks import known_masks_indexed
from autopar.frontend.lists_apart import lists_taken_apart
from autopar.frontend.masked_reads import masked_reads_spread
from autopar.frontend.mixed_dtypes import refuse_mixed_dtypes
from autopar.frontend.refusals import refuse_untrained
from autopar.frontend.value_checks import ASSERTS, checks_as_outputs
from autopar.graph.autocast import Autocast, Region
from autopar.graph.differentiable import differentiable, is_float
from autopar.graph.emit import replace, tensor_of
from autopar.graph.fake_values import IN_PLACE_VIEWS, set_fake_values
from autopar.graph.overwrites import gives_back, memory_of, writers_of, written_by
from autopar.ir.arguments import all_named, arguments, node_at
from autopar.ir.keys import EXACT, SOURCE, Source
from autopar.ir.leaf_names import leaf_names
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, InputKind, Output, Program, Signature
from autopar.ir.source import WRAPPED, set_sources, source_of
from autopar.ops.traits import casts_at_need

aten = torch.ops.aten

_KINDS: dict[ExportedKind, InputKind] = {
    ExportedKind.PARAMETER: "parameter",
    ExportedKind.BUFFER: "buffer",
    ExportedKind.CONSTANT_TENSOR: "constant",
    ExportedKind.USER_INPUT: "batch",
}


# The flags by which ops are asked for sparse gradients.
_SPARSE = {"aten.embedding.": "sparse", "aten.embedding_bag.": "sparse", "aten.gather.": "sparse_grad"}


def forward_program(
    exported: ExportedProgram,
    mesh: Mesh,
    trainable: frozenset[str],
    structure: Any,
    leaves: tuple[Any, ...],
    loss_index: int | None,
    kept: tuple[int, ...] | None = None,
    device: str = "cpu",
    autocast: Autocast | None = None,
    asking: Mapping[str, str] | None = None,
    assigned: tuple[str, ...] = (),
) -> Program:
    """The FORWARD program of what was exported.

    The model is on devices of type `device`, and was called under `autocast`, whose casts the program has as nodes.

    `trainable` names the parameters that get gradients; `structure` and `leaves` describe the user's output, in which the
    loss is leaf `loss_index` (None: there is none); `kept` are the leaves that the graph returns, all by default.
    `asking` are what `refuse_untrained` takes. The last results that were exported are those that forward has `assigned` to these buffers.
    Raises `CaptureError` for what has no place.
    """
    graph, mapping = Graph(), dict[Node, Any]()
    constants: dict[str, torch.Tensor] = {}
    inputs = _inputs(exported, trainable)
    for item, node in inputs:
        mapping[node] = placeholder_of(graph, item)
        mapping[node].meta = dict(node.meta)
        if item.kind == "constant":
            constants[item.name] = _on_host(cast(torch.Tensor, exported.constants[item.name]))
    apart = lists_taken_apart(exported.graph_module.graph)
    needless_copies_dropped(exported.graph_module.graph)
    copies = _Copies(graph, mapping, device, [None if autocast is None else Region(autocast)], apart)
    copies.calls(exported.graph_module)
    hooks_placed(graph)
    own_data_kept(graph)
    outputs = _copy_outputs(exported, graph, mapping, loss_index, kept, assigned)
    other_data_copied(graph)
    items = list(written_as_buffers(graph, [item for item, _ in inputs]))
    held = {mapping[node]: constants[item.name] for item, node in inputs if item.kind == "constant"}
    known_masks_indexed(graph, held, copies.regions, _adding_constants(graph, items, constants))
    masked_reads_spread(graph, copies.regions)
    signature = Signature(tuple(items), outputs, structure, leaves)
    kinds = {region.autocast.device for region in copies.regions.values() if region.autocast is not None}
    # As data-parallel training has it: autocast gives a parameter of float32 a gradient of float32, and that is what is summed.
    reduce = torch.float32 if kinds else None
    program = Program(graph, mesh, signature, Form.FORWARD, constants, autocast=min(kinds, default=None), reduce=reduce)
    _refuse_transforms(graph)
    _make_gradients_dense(graph)
    copies_of_attention_kept(graph)
    try:
        set_fake_values(program, copies.regions)
        copies.detach_casts()
        set_sources(program.graph, WRAPPED)
    finally:  # also where it fails: for this reason, mostly, which is then the one to tell
        names = _names(exported)
        refuse_mixed_dtypes(program, {mapping[node]: names[int(item.name)] for item, node in inputs if item.kind == "batch"})
    _refuse_sparse(program.graph)
    program = _with_dtypes(program)
    refuse_untrained(program, asking or {})  # while what is detached can be told
    data_writes_detached(program)
    _drop_needless_detaches(program)
    return checks_as_outputs(program)


def _inputs(exported: ExportedProgram, trainable: frozenset[str]) -> list[tuple[Input, Node]]:
    """Every tensor that the graph takes: parameters, buffers, constants, then the batch by flat index of its leaf."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    users = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind == ExportedKind.USER_INPUT]
    found: list[tuple[Input, Node]] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            kind, name = _identity(specs[node.name], users)
            found.append((Input(kind, name, tuple(value.shape), value.dtype, name in trainable and kind == "parameter"), node))
    order = list(_KINDS.values())
    return sorted(found, key=lambda pair: order.index(pair[0].kind))


def _names(exported: ExportedProgram) -> list[str]:
    """Of each leaf of the call, as the user would name it."""
    structure = exported.call_spec.in_spec
    assert structure is not None
    args, kwargs = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    return leaf_names(args, kwargs)


def _identity(spec: InputSpec, users: list[str]) -> tuple[InputKind, str]:
    if spec.kind not in _KINDS:
        raise CaptureError(f"the captured graph takes {spec.arg} of kind {spec.kind}, which autopar cannot place; move it out of forward")
    kind = _KINDS[spec.kind]
    if kind == "batch":
        return kind, str(users.index(spec.arg.name))
    name = spec.target or ""
    return kind, name if kind == "constant" else name.removeprefix(WRAPPED)


def placeholder_of(graph: Graph, item: Input) -> Node:
    """The placeholder of an input. Both its name and its target are arguments of generated code: valid in Python, and no two alike
    (`offset["default"]` is a name of a parameter, and `a.b` and `a_b` may be two)."""
    prefix = {"parameter": "p", "buffer": "b", "constant": "c", "batch": "input"}[item.kind]
    node = graph.placeholder(re.sub(r"\W", "_", f"{prefix}_{item.name}"))
    node.target = node.name
    return node


def _adding_constants(graph: Graph, items: list[Input], constants: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], Node]:
    """What makes another constant: an item behind the others, its value, and the placeholder that it gives."""

    def add(value: torch.Tensor) -> Node:
        place, name = sum(item.kind != "batch" for item in items), f"places_{len(constants)}"
        items.insert(place, Input("constant", name, tuple(value.shape), value.dtype))
        constants[name] = value
        nodes = list(graph.nodes)
        with graph.inserting_before(nodes[place]):
            node = placeholder_of(graph, items[place])
        node.meta["val"] = value
        return node

    return add


@dataclass
class _Copies:
    """Copies exported calls into `graph`. `regions` says which calls run under which autocast, for tensors on `device`."""

    graph: Graph
    mapping: dict[Node, Any]
    device: str
    entered: list[Region | None]  # the autocast around the call, and those that forward has entered since, the innermost last
    uncast: frozenset[Node]  # what runs under no autocast, wherever it stands
    regions: dict[Node, Region] = field(default_factory=dict)
    is_detached: bool = False  # under `no_grad`
    # Under `no_grad`: what was made since it began; and the views, in whose place values from outside are seen.
    made: set[Node] = field(default_factory=set)
    views: dict[Node, Node] = field(default_factory=dict)
    outside: dict[Node, Node] = field(default_factory=dict)  # of each such view the value from outside
    casts: list[Node] = field(default_factory=list)  # under `no_grad`; what casts nothing is the operand itself

    def calls(self, module: GraphModule) -> None:
        """Copy the calls of `module`: what is under `no_grad` computes with detached values, what is under an autocast is in `regions`."""
        for node in module.graph.nodes:
            # What else torch asserts, of shapes and dtypes, held when it was traced.
            if node.op in ("placeholder", "get_attr", "output") or ("_assert" in str(node.target) and node.target not in ASSERTS):
                continue
            assert node.op == "call_function", node.format_node()
            mark = REGION_MARKS.get(node.target)
            if mark == "gradients":
                self.is_detached, self.made, self.views = not node.args[0], set(), {}
            elif mark == "autocast":
                self.entered.append(self._entered(node.args))
            elif mark == "end of autocast":
                self.entered.pop()
            elif isinstance(node.target, HigherOrderOperator):
                raise CaptureError(
                    f"forward calls {node.target}, an op of torch's with graphs of its own, which autopar does not rewrite\n"
                    f"  where: {_region_source(module, list(arguments(node))).at}\n"
                    "  how to mend it: choose by torch.where(condition, a, b), step through a loop of a known length in Python, and call "
                    "plainly what is called as it is"
                )
            else:
                self._copy(node)

    def _copy(self, node: Node) -> None:
        may_be_same = bool(node.meta.get(GIVEN_BACK)) or casts_at_need(node)  # and have the gradient that it has: dtypes are not known yet
        detaches = self.is_detached and not may_be_same and node.target is not operator.getitem
        copied = self.graph.node_copy(node, lambda argument: self._inside(argument) if detaches else self.mapping[argument])
        copied.args, copied.kwargs = pytree.tree_map(_on_cpu, (copied.args, dict(copied.kwargs)))
        # What is written in place is itself, inside and outside.
        self.mapping[node] = self.outside.get(_written(copied), copied)
        if self.is_detached:
            (self.casts.append if may_be_same else self.made.add)(copied)
        region = self.entered[-1]
        if region is not None and region.autocast is None:
            EXACT[copied] = True
        if region is not None and node not in self.uncast:
            self.regions[copied] = region
        if copied.target is torch.ops.autopar.custom_function.default:
            operands, site = copied.args
            copied.target, copied.args = function_at(site), tuple(operands)
        if copied.target in IN_PLACE_VIEWS:
            self._rename(copied)

    def _inside(self, argument: Node) -> Node:
        """What `no_grad` sees of a value: of one from outside a detached view. What is written there has no gradient either."""
        value = self.mapping[argument]
        if _written(value) in self.made:
            return value
        if value not in self.views:
            self.views[value] = self._detached(value)
            self.outside[self.views[value]] = value
        return self.views[value]

    def detach_casts(self) -> None:
        """Once it is known what copies: a trace may have other dtypes (on meta, without an autocast; of an LSTM), and another layout."""
        for node in self.casts:
            operand = node_at(node, 0)
            if tensor_of(operand).dtype != tensor_of(node).dtype or node.target is aten.clone.default:
                with self.graph.inserting_before(node):
                    node.replace_input_with(operand, self._detached(operand))

    def _detached(self, value: Node) -> Node:
        detached = self.graph.call_function(aten.detach.default, (value,))
        detached.meta = dict(value.meta)
        return detached

    def _rename(self, copied: Node) -> None:
        """What changes the shape of its operand in place is another view of its memory, which all names of the operand mean from then on.
        Views that were made of it before stay as they are; torch's own functional form of such an op makes others of them."""
        operand = _written(node_at(copied, 0))
        if copied.target is aten.detach_.default:
            operand = self.outside.get(operand, operand)
        elif operand in self.outside:
            raise CaptureError(
                f"under no_grad forward changes the shape of a value from outside in place ({copied.target}), which would be lost\n"
                f"  where: {source_of(copied, WRAPPED).at}\n"
                "  how to mend it: without the underscore it is a view, x = x.transpose(0, 1)"
            )
        copied.target = IN_PLACE_VIEWS[copied.target]
        for name, value in self.mapping.items():
            if isinstance(value, Node) and _written(value) is operand:
                self.mapping[name] = copied

    def _entered(self, args: Sequence[Any]) -> Region:
        """The region that `torch.autocast(device, dtype, enabled, cache)` opens; what is on other devices it leaves as it was."""
        device, dtype, enabled, caches = args
        outer = self.entered[-1]
        autocast = outer.autocast if outer is not None else None
        if self.device in (device, "meta"):
            keeps = (autocast is None or autocast.caches) if caches is None else bool(caches)
            autocast = Autocast(device, dtype or torch.get_autocast_dtype(device), keeps) if enabled else None
        return Region(autocast, outer.weights) if outer is not None else Region(autocast)


def _on_host(constant: torch.Tensor) -> torch.Tensor:
    """Where a program is looked at: ops there name the CPU, whatever the model is on. On meta there are no values to bring. It asks for no
    gradient, for which a program has no place."""
    constant = constant.detach() if constant.requires_grad else constant
    return constant if constant.is_meta else constant.cpu()


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _written(result: Node) -> Node:
    """The value that in-place ops wrote to make `result`, which they returned; `result` itself if none did."""
    while result.op == "call_function" and gives_back(result):
        result = written_by(result)
    return result


def _drop_needless_detaches(program: Program) -> None:
    """Drop a detach of a gradient-free value, unless a differentiable one may later be written into its memory."""
    trained, written = differentiable(program), {memory_of(each) for each in writers_of(program.graph)}
    for node in program.graph.find_nodes(op="call_function", target=aten.detach.default):
        operand = node_at(node, 0)
        if operand not in trained and (memory_of(operand) not in written or memory_of(operand).op == "placeholder"):
            replace(node, operand)


def _region_source(module: GraphModule, args: list[Any]) -> Source:
    """Where the first call of a region stands."""
    bodies = [getattr(module, str(argument.target)) for argument in args if isinstance(argument, Node) and argument.op == "get_attr"]
    calls = [node for body in bodies for node in body.graph.nodes if node.meta.get("stack_trace")]
    return source_of(calls[0], WRAPPED) if calls else Source()


def _copy_outputs(
    exported: ExportedProgram,
    graph: Graph,
    mapping: dict[Node, Any],
    loss_index: int | None,
    kept: tuple[int, ...] | None,
    assigned: tuple[str, ...],
) -> tuple[Output, ...]:
    """Outputs of the graph; the loss, where there is one, is the leaf `loss_index` of the user's structure; `kept` as above."""
    outputs: list[Output] = []
    nodes: list[Node] = []
    position = 0
    results: Any = exported.graph.output_node().args[0]
    end = len(results) - len(assigned)
    for entry, node in zip(exported.graph_signature.output_specs, results, strict=True):
        mutation = entry.kind == ExportedOutput.BUFFER_MUTATION
        if isinstance(node, Node):
            value = node.meta["val"]
            kind, name = "buffer", assigned[position - end] if position >= end else (entry.target or "").removeprefix(WRAPPED)
            if not mutation and position < end:
                place = position if kept is None else kept[position]
                kind, name = "loss" if place == loss_index else "output", str(place)
            outputs.append(Output(kind, name, tuple(value.shape), value.dtype, kind != "buffer" and is_float(node)))
            nodes.append(mapping[node])
        position += not mutation
    graph.output(tuple(nodes))
    return tuple(outputs)


def _with_dtypes(program: Program) -> Program:
    """Outputs in the dtypes that they have once casts are written out: export does not see those of a device that is not there."""
    outputs = tuple(replace_fields(output, dtype=tensor_of(node).dtype) for output, node in program.named_outputs())
    return replace_fields(program, signature=replace_fields(program.signature, outputs=outputs))


def _refuse_transforms(graph: Graph) -> None:
    """Their levels are entered and left by calls, between which ops compute on what only torch.func can read."""
    for node in graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            raise CaptureError(
                "forward computes under a transform of torch.func (vmap, jvp, grad), which is no graph of plain ops\n"
                f"  where: {source_of(node).at}\n"
                "  how to mend it: in place of vmap write its dim out (torch.einsum, bmm, broadcasting); derivatives have no such form"
            )


def _make_gradients_dense(graph: Graph) -> None:
    """What is asked for sparse gradients gets the same numbers in dense ones: ranks sum gradients, and the layout is no part of what the
    model computes."""
    for node in graph.nodes:
        flag = next((flag for name, flag in _SPARSE.items() if str(node.target).startswith(name)), "")
        named = all_named(node) if flag else {}
        if named.get(flag):
            kept = {**named, flag: False}
            positions = [each.name for each in schema_of(node.target).arguments if not each.kwarg_only]
            node.args, node.kwargs = tuple(kept.pop(name) for name in positions), kept


def _refuse_sparse(graph: Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {value.layout}, of which nothing is known that could be split\n"
                f"  where: {SOURCE[node].at}\n"
                "  how to mend it: compute with dense tensors, masked where they are zero, or with scatter_add and index_select"
            )
