"""Programs as text: one line a node, in the user's names, grouped by the user's modules and lines.

    GLOBAL program on dp=2 × tp=2: 3 nodes

    inputs
        parameter fc.weight : f32[32@tp, 16]
        batch 0             : f32[8@dp, 16]

    forward
      fc
        %t  : f32[16, 32@tp]   = aten.t(fc.weight)                             # model.py:12  return self.fc(x)
        %mm : f32[8@dp, 32@tp] = aten.mm(batch.0, %t)
        …

A node's type shows its sharding where one is decided (`16@tp`: the 16 is split over axis tp; `sum@tp`:
still to be summed over tp), its local shape in LOCAL form. Lines that move data between ranks start with `⇄`. Before the name
stands the stage of a pipeline that computes it, where one is decided: `stage 1`.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.collectives import reshard
from autopar.ir.keys import DIMS, ORIGIN, PHASE, SHARDING, SOURCE, STAGE, Source
from autopar.ir.program import Form, Input, Output, Program
from autopar.ir.sharding import Dims, Sharding

_WIDTH = 96
_MAX_ITEMS = 12
_DTYPES: dict[torch.dtype, str] = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float32` → `f32`."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def op_name(target: object) -> str:
    """`aten.mm`, `aten.add.Tensor`, `all_reduce`: how people write the op."""
    if hasattr(target, "overloadpacket"):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def moves_data(node: Node) -> bool:
    """Whether the node is a collective, a wait or a reshard."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == reshard.__module__


def describe_value(value: Any, dims: Dims | None = None, sharding: Sharding | None = None) -> str:
    """The type of one value: `f32[8@dp, 16]`; an integer or None prints as itself."""
    if not isinstance(value, torch.Tensor):
        return "-" if value is None else type(value).__name__
    shape = tuple(int(size) for size in value.shape)
    if dims is None:
        return f"{short_dtype(value.dtype)}{list(shape)}"
    return short_dtype(value.dtype) + (sharding or Sharding.replicated(dims)).describe(dims)


def describe_node(node: Node, local: bool = False) -> str:
    """The type of a node's result, or of its results in parentheses."""
    value = node.meta.get("val")
    many = isinstance(value, (tuple, list))
    values = tuple(value) if many else (value,)
    unknown = (None,) * len(values)
    dims = unknown if local else (DIMS.get(node) or unknown)
    shardings = unknown if local else (SHARDING.get(node) or unknown)
    if len(dims) != len(values) or len(shardings) != len(values):
        dims = shardings = unknown
    parts = [describe_value(*item) for item in zip(values, dims, shardings, strict=True)]
    return f"({', '.join(parts)})" if many else parts[0]


@dataclass(frozen=True)
class _Line:
    """One node: its name, its type, what computes it, and where the user wrote it."""

    name: str
    type: str
    code: str
    moves: bool
    phase: str
    source: Source
    stage: str


class _Names:
    """How values are written: inputs by their original names, other nodes as `%name`."""

    def __init__(self, program: Program, by_origin: bool = False) -> None:
        self._names: dict[Node, str] = {}
        taken: set[str] = set()
        for node in program.graph.nodes:
            own, origin = f"%{node.name}", f"%{ORIGIN.get(node) or node.name}"
            name = origin if by_origin and origin not in taken else own
            taken.add(name)
            self._names[node] = name
        for item, node in zip(program.signature.inputs, program.placeholders, strict=False):
            self._names[node] = item.name if item.kind in ("parameter", "buffer") else f"{item.kind}.{item.name}".rstrip(".")

    def __getitem__(self, node: Node) -> str:
        return self._names[node]

    def write(self, value: Any) -> str:
        """An argument as text; long lists of literals are cut and say how long they are."""
        if isinstance(value, Node):
            return self[value]
        if isinstance(value, (list, tuple)):
            parts = [self.write(item) for item in value[:_MAX_ITEMS]]
            if len(value) > _MAX_ITEMS:
                parts.append(f"… {len(value)} in all")
            return f"[{', '.join(parts)}]" if isinstance(value, list) else f"({', '.join(parts)}{',' if len(value) == 1 else ''})"
        if isinstance(value, torch.dtype):
            return short_dtype(value)
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, (Sharding, torch.fx.GraphModule)):
            return type(value).__name__
        return repr(value)

    def call(self, node: Node) -> str:
        if node.op == "get_attr":
            return f"constant {node.target}"
        if node.target is reshard:
            return f"reshard({self.write(node.args[0])}: {_before(node)})"
        if node.target is operator.getitem:
            return f"{self.write(node.args[0])}[{node.args[1]}]"
        written = [self.write(value) for value in node.args]
        written += [f"{key}={self.write(value)}" for key, value in node.kwargs.items() if value is not None]
        return f"{op_name(node.target)}({', '.join(written)})"


def _before(node: Node) -> str:
    """The sharding a reshard starts from, without the dtype."""
    source = node.args[0]
    assert isinstance(source, Node)
    if source not in SHARDING or source not in DIMS:
        return "?"
    return SHARDING[source][0].describe(DIMS[source][0])


def print_program(
    program: Program, by_origin: bool = False, stages: Collection[int] | None = None, shown: Collection[Node] | None = None
) -> str:
    """`program` as text. With `by_origin`, LOCAL nodes bear the names of the GLOBAL nodes they came from.

    With `stages`, or the nodes that are to be `shown`, only the calls of these stages of a pipeline, or those nodes, what they read of the
    inputs and what they give of the outputs.
    """
    names = _Names(program, by_origin)
    local = program.form is Form.LOCAL
    chosen = [node for node in program.graph.nodes if node.op not in ("placeholder", "output") and (shown is None or node in shown)]
    of_all = f", of which {len(chosen)} are shown" if shown is not None else ""
    if stages is not None:
        chosen = [node for node in chosen if STAGE.get(node) in stages]
        which = ", ".join(map(str, sorted(stages)))
        of_all = f", of which stage{'s' if len(stages) > 1 else ''} {which} ha{'ve' if len(stages) > 1 else 's'} {len(chosen)}"
    of_part = None if stages is None and shown is None else set(chosen)
    read = None if of_part is None else {each for node in chosen for each in node.all_input_nodes}
    lines = [f"{program.form.value} program on {str(program.mesh) or 'one rank'}: {program.num_nodes} nodes{of_all}", "", "inputs"]
    lines += _inputs(program, local, read)
    lines += _body([_line(node, names, local) for node in chosen])
    lines += ["", "outputs", *_outputs(program, names, local, of_part)]
    return "\n".join(line.rstrip() for line in lines)


def _inputs(program: Program, local: bool, shown: Collection[Node] | None) -> list[str]:
    rows = []
    for item, node in zip(program.signature.inputs, program.placeholders, strict=False):
        if shown is not None and node not in shown:
            continue
        rows.append(
            (f"{item.kind} {item.name}", _typed(item, node, local), "" if item.requires_grad or item.kind != "parameter" else "frozen")
        )
    return _columns(rows)


def _outputs(program: Program, names: _Names, local: bool, shown: Collection[Node] | None) -> list[str]:
    rows = []
    for item, node in zip(program.signature.outputs, program.results, strict=False):
        if shown is not None and node not in shown:
            continue
        value = names[node] if isinstance(node, Node) else repr(node)
        rows.append((f"{item.kind} {item.name}", _typed(item, node, local), f"= {value}"))
    return _columns(rows)


def _typed(item: Input | Output, node: Any, local: bool) -> str:
    if isinstance(node, Node) and (local or node in DIMS):
        return describe_node(node, local)
    return f"{short_dtype(item.dtype)}{list(item.shape)}"


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return [f"    {name:<{first}} : {kind:<{second}} {rest}" for name, kind, rest in rows]


def _line(node: Node, names: _Names, local: bool) -> _Line:
    stage = f"stage {STAGE[node]}" if node in STAGE else ""
    phase, source = PHASE.get(node) or "", SOURCE.get(node) or Source()
    return _Line(names[node], describe_node(node, local), names.call(node), moves_data(node), phase, source, stage)


def _body(lines: Iterable[_Line]) -> Iterator[str]:
    """Nodes in graph order; a heading where the phase or the module changes, one blank line between groups."""
    phase = module = None
    group: list[_Line] = []
    for line in lines:
        if (line.phase, line.source.module) != (phase, module):
            yield from _group(group)
            group = []
            if line.phase != phase:
                yield ""
                yield line.phase or "nodes"
            yield f"  {line.source.module or '(no module)'}"
            phase, module = line.phase, line.source.module
        group.append(line)
    yield from _group(group)


def _group(lines: list[_Line]) -> Iterator[str]:
    """The nodes of one module, names and types aligned, the user's line at the first node of each."""
    name_width = min(28, max((len(line.name) for line in lines), default=0))
    type_width = min(44, max((len(line.type) for line in lines), default=0))
    stage_width = max((len(line.stage) + 1 for line in lines if line.stage), default=0)
    place = None
    for line in lines:
        text = (
            f"  {'⇄' if line.moves else ' '} {line.stage:<{stage_width}}{line.name:<{name_width}} : {line.type:<{type_width}} = {line.code}"
        )
        here = _place(line.source)
        yield f"{text:<{_WIDTH}}  # {here}" if here and here != place else text
        place = here


def _place(source: Source) -> str:
    if not source.file:
        return ""
    code = " ".join(source.code.split())
    code = f"{code[:57]}…" if len(code) > 58 else code
    return f"{os.path.basename(source.file)}:{source.line}  {code}".rstrip()


def diff(
    before: Program, after: Program, context: int = 2, shown: tuple[Collection[Node] | None, Collection[Node] | None] = (None, None)
) -> str:
    """A unified diff of two programs' prints, or of the nodes of each that are to be `shown`; LOCAL nodes under the names of their
    origins, so that equal nodes stay equal."""
    texts = [print_program(each, by_origin=True, shown=nodes).splitlines() for each, nodes in zip((before, after), shown, strict=True)]
    squeezed = [[_squeeze(line) for line in text] for text in texts]
    lines = difflib.unified_diff(*squeezed, fromfile="before", tofile="after", n=context, lineterm="")
    return "\n".join(lines) or "no difference"


def _squeeze(line: str) -> str:
    """Alignment and source comments differ with the neighbours; what is computed does not."""
    indent = len(line) - len(line.lstrip())
    return " " * indent + " ".join(line.split("  # ", 1)[0].split())
