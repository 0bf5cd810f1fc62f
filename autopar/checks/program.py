"""Invariants of any program: the graph is sound, its values are what its ops compute, its signature fits.

the graph passes torch.fx's lint; every tensor node knows its value
placeholders and results are as many as the signature says, with its shapes and dtypes
running each op on the shapes of its operands gives the shape, dtype and strides the node claims
the atoms of a value multiply to its shape
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from autopar._torch import FakeTensorMode, OpOverload, fake_mode, pytree, schema_of, writes_operands
from autopar.checks.violation import Violation, at
from autopar.graph.fake_calls import fake_call
from autopar.ir.keys import DIMS
from autopar.ir.printing import short_dtype
from autopar.ir.program import Form, Input, Output, Program, results_of
from autopar.ir.sharding import shape_of
from autopar.ops.strategies import Space


class TensorMetadata(NamedTuple):
    """All that an op's result depends on besides data, or that it yields: shape, strides, dtype, device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMetadata:
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return TensorMetadata(shape, strides, tensor.dtype, tensor.device, int(tensor.storage_offset()))

    def equals(self, other: TensorMetadata, strides: bool) -> bool:
        if (self.shape, self.dtype, self.device) != (other.shape, other.dtype, other.device):
            return False
        return not strides or 0 in self.shape or self._real_strides() == other._real_strides()

    def _real_strides(self) -> tuple[int, ...]:
        """The strides that address anything: a dim of size 1 may have any."""
        return tuple(stride for size, stride in zip(self.shape, self.strides, strict=True) if size != 1)

    def describe(self, strides: bool) -> str:
        text = f"{short_dtype(self.dtype)}{list(self.shape)}"
        return f"{text} strides {list(self.strides)} on {self.device}" if strides else f"{text} on {self.device}"

    def tensor(self) -> torch.Tensor:
        size = sum(stride * (n - 1) for n, stride in zip(self.shape, self.strides, strict=True)) + 1 + self.offset
        storage = torch.empty(0 if 0 in self.shape else size, dtype=self.dtype, device=self.device)
        return storage.as_strided(self.shape, self.strides, 0 if 0 in self.shape else self.offset)


Outcome = tuple[TensorMetadata | None, ...] | str


_MOST_KNOWN = 100_000
_known: dict[Any, Outcome] = {}


@dataclass
class Values:
    """What ops yield for operands of given metadata; equal calls (80 equal layers, the next pass, the next compile) run once.

    A call is known by its op, its literals, the metadata of its operands and the default dtype, on which alone it depends: so all
    checkers share what is known. `spaces` are their iteration spaces, by signature.
    """

    known: dict[Any, Outcome] = field(default_factory=lambda: _known)
    mode: FakeTensorMode = field(default_factory=fake_mode)
    tensors: dict[TensorMetadata, torch.Tensor] = field(default_factory=dict)
    own: dict[Any, Outcome] = field(default_factory=dict)
    spaces: dict[Hashable, Space] = field(default_factory=dict)

    def of(self, node: Node, described: dict[Node, Any] | None = None) -> Outcome:
        """The metadata of the results of `node` (None where one is no tensor), or why it cannot run.

        `described` is what `_key` makes of operands; what it lacks is added.
        """
        described = {} if described is None else described
        key = (node.target, _key(node.args, described), _key(node.kwargs, described), torch.get_default_dtype())
        # A user's own function lives as long as its program: what it yields is for this checker alone.
        known = self.known if isinstance(node.target, OpOverload) else self.own
        found = known.get(key)
        if found is None:
            found = self._run(node)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = found
        return found

    def _run(self, node: Node) -> Outcome:
        leaves_operands = schema_of(node.target) is not None and not writes_operands(node.target)
        operand = self._operand if leaves_operands else self._fresh_operand
        try:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            result = fake_call(self.mode, node.target, args, kwargs)
        except Exception as error:  # any failure of the op is the finding
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        many = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(TensorMetadata.of(item) if isinstance(item, torch.Tensor) else None for item in many)

    def _operand(self, node: Node) -> Any:
        """One tensor of each shape, dtype, strides and device serves every op that changes none."""
        return _mapped(node.meta["val"], self._tensor)

    def _fresh_operand(self, node: Node) -> Any:
        return _mapped(node.meta["val"], self._new_tensor)

    def _tensor(self, like: torch.Tensor) -> torch.Tensor:
        metadata = TensorMetadata.of(like)
        if metadata not in self.tensors:
            self.tensors[metadata] = self._new_tensor(like)
        return self.tensors[metadata]

    def _new_tensor(self, like: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return TensorMetadata.of(like).tensor()


def _mapped(value: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return make(value) if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, make, value)


def _key(value: Any, described: dict[Node, Any]) -> Any:
    """A hashable stand-in for an argument; nodes count by the metadata of their values, which go into `described`."""
    if isinstance(value, Node):
        found = described.get(value)
        if found is None:
            described[value] = found = _key(value.meta.get("val"), described)
        return found
    if isinstance(value, int):
        return (type(value), value)  # 1, 1.0 and True are equal in Python and different to an op
    if isinstance(value, (tuple, list)):
        return (type(value), *[_key(item, described) for item in value])
    if isinstance(value, torch.Tensor):
        return TensorMetadata.of(value)
    if isinstance(value, dict):
        return tuple([(name, _key(item, described)) for name, item in value.items()])
    if isinstance(value, slice):
        return ("slice", *[_key(item, described) for item in (value.start, value.stop, value.step)])
    return (float, repr(value)) if isinstance(value, float) else value  # as text: -0.0 is equal to 0.0


def check_program(program: Program, values: Values | None = None) -> list[Violation]:
    """Every violation of the invariants above; none when the program is sound."""
    found = list(_graph(program))
    if found:
        return found
    return [*_signature(program), *_values(program, values or Values()), *_atoms(program)]


def _graph(program: Program) -> Iterator[Violation]:
    try:
        program.graph.lint()
    except Exception as error:
        yield Violation(f"the graph is malformed: {error}", fix="a pass must leave a graph that passes torch.fx's lint", is_fatal=True)
        return
    for kind, nodes, items in (
        ("input", program.placeholders, program.signature.inputs),
        ("result", program.results, program.signature.outputs),
    ):
        if len(nodes) != len(items):
            yield Violation(
                f"the signature does not fit the graph's {kind}s",
                expected=f"{len(items)} {kind}s: {', '.join(f'{item.kind} {item.name}' for item in items)}",
                got=f"{len(nodes)}: {', '.join(str(node) for node in nodes)}",
                fix="change graph and signature together",
                is_fatal=True,
            )
    for index, node in enumerate(program.results):
        if not isinstance(node, Node):
            yield Violation(
                f"result {index} is no node", expected="a node", got=repr(node), fix="return zeros where nothing is computed", is_fatal=True
            )
    for node in program.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            yield Violation("the node has no value", at(node), fix="set meta['val'] when a node is made", is_fatal=True)


def _signature(program: Program) -> Iterator[Violation]:
    for item, node in (*program.named_inputs(), *program.named_outputs()):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        expected = _shape(item, program)
        if (tuple(value.shape), value.dtype) != (expected, item.dtype):
            yield Violation(
                f"{item.kind} {item.name!r} is not what the signature says",
                at(node),
                f"{short_dtype(item.dtype)}{list(expected)}",
                f"{short_dtype(value.dtype)}{list(value.shape)}",
                "change graph and signature together",
            )


def _shape(item: Input | Output, program: Program) -> tuple[int, ...]:
    if program.form is Form.LOCAL and item.sharding is not None:
        return item.sharding.local_shape(item.dims, program.mesh)
    return item.shape if item.padding is None else shape_of(item.padding.after)


def _values(program: Program, values: Values) -> Iterator[Violation]:
    # Composite ops of FORWARD choose strides by backend and grad mode, and the joint trace computes them anew.
    strides = program.form is not Form.FORWARD
    described: dict[Node, Any] = {}  # the metadata of each value, which its readers ask for as well
    for node in program.graph.nodes:
        if node.op != "call_function" or any(operand.op == "get_attr" for operand in node.all_input_nodes):
            continue
        outcome = values.of(node, described)
        if isinstance(outcome, str):
            yield Violation("the op does not run on its operands", at(node), got=outcome, fix="adapt its arguments to its operands' shapes")
            continue
        claimed = _claimed(node, described)
        if outcome != claimed and not _all_equal(outcome, claimed, strides):
            yield Violation(
                "the node's value is not what its op computes",
                at(node),
                _describe(outcome, strides),
                _describe(claimed, strides),
                "set meta['val'] from the op and its operands",
            )


def _claimed(node: Node, described: dict[Node, Any]) -> tuple[TensorMetadata | None, ...]:
    found = _key(node, described)
    if isinstance(found, TensorMetadata):
        return (found,)
    return tuple(None if result is None else TensorMetadata.of(result) for result in results_of(node))


def _all_equal(first: tuple[TensorMetadata | None, ...], second: tuple[TensorMetadata | None, ...], strides: bool) -> bool:
    if len(first) != len(second):
        return False
    return all(a is b if a is None or b is None else a.equals(b, strides) for a, b in zip(first, second, strict=True))


def _describe(results: tuple[TensorMetadata | None, ...], strides: bool) -> str:
    return ", ".join("no tensor" if each is None else each.describe(strides) for each in results)


def _atoms(program: Program) -> Iterator[Violation]:
    if program.form is Form.LOCAL:
        return
    for node in program.graph.nodes:
        dims = DIMS.get(node)
        if dims is None:
            continue
        shapes = tuple(() if result is None else tuple(result.shape) for result in results_of(node))
        claimed = tuple(shape_of(each) for each in dims)
        if claimed != shapes:
            yield Violation(
                "the atoms do not multiply to the value's shape", at(node), str(shapes), str(claimed), "set DIMS anew when a shape changes"
            )
