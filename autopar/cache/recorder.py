"""A run of a model on fake tensors as lines of text: every op that reaches a kernel, with its scalars, its operands and where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar._torch import OpOverload, TorchDispatchMode, gives_views, is_fake, outside_fake_modes, pytree, writes_operands
from autopar.cache._torch import is_custom, is_plain, sequence_number, sequence_of
from autopar.cache.code import Stack
from autopar.cache.describe import NotKnown, described

aten = torch.ops.aten
# Of these namespaces ops are what their names say.
_NAMESPACES = ("aten", "prims", "autopar")
# What gives a literal, `torch.tensor([1.0])`, to the ops that read it.
_LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
# What a trace may leave out, or add.
_NOTHING = (*_LITERALS, aten.detach.default, aten.alias.default)


class Op(NamedTuple):
    """One call: its text without its place, with the names of parameters, buffers, inputs, literals that it reads, and the memory that it
    reads and gives, by number. One that `writes` changes its operands."""

    text: str
    reads: frozenset[int]
    gives: frozenset[int]
    writes: bool
    computes: bool


class Recorder(TorchDispatchMode):
    """Writes down every op that reaches a kernel. Memory is known by its number, in the order in which it is first seen."""

    def __init__(self, end: CodeType) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.ops: list[Op] = []
        self.literals: set[str] = set()
        # What was raised, which a model may have caught.
        self.refused: NotKnown | None = None
        self.stack = Stack(end)
        self._storages: dict[StorageWeakRef, int] = {}
        self._given: set[int] = set()
        self._names: dict[int, str] = {}
        self._held: list[torch.Tensor] = []  # so that no memory takes the place of another
        self._first = sequence_number()

    def name(self, name: str, tensor: torch.Tensor) -> None:
        self._new(tensor)
        self._given |= self.memory(tensor)
        self._call(name, tensor)
        self.lines.append(f"{name} is {self._place(tensor)} {tensor.requires_grad}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._called(func, args, kwargs or {})
        except NotKnown as why:
            self.refused = self.refused or why
            raise

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # a question, and no op; more are asked than there are ops, and asked on they take longer
        if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
            raise NotKnown(f"forward calls {func}, of which only its author knows what it does")
        operands = self._described((args, kwargs), self._literal if func in _LITERALS else self._operand)
        form = self._described((args, kwargs), self._named)
        result = func(*args, **kwargs)
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._new(each)
        if func in _LITERALS:
            self._call(self._name_of(args[0]) if is_fake(args[0]) else literal_line(args[0]), result)
        results = self._described(result, self._place)
        state = f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {_autocasts()} {sequence_number() - self._first}"
        reads, gives = self.memory((args, kwargs)), self.memory(result)
        self.ops.append(Op(f"{func} {form}", reads, gives, writes_operands(func), func not in _NOTHING and not gives_views(func)))
        self.lines.append(f"{func} {operands} -> {results} {state} {self.stack.now()}")
        return result

    def memory(self, values: Any) -> frozenset[int]:
        """The numbers of what these values lie in."""
        found = (each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor) and is_fake(each))
        return frozenset(self._storages[StorageWeakRef(each.untyped_storage())] for each in found)

    def needed(self, results: Iterable[int]) -> Counter[str]:
        """The ops that compute something which these results, or what there was before, are made of."""
        live, found = {*results, *self._given}, Counter[str]()
        for op in reversed(self.ops):
            if not op.gives or op.gives & live or (op.writes and op.reads & live):
                live |= op.reads
                found[op.text] += op.computes
        return +found

    def _described(self, value: Any, of_tensor: Callable[[torch.Tensor], str]) -> str:
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join([self._described(each, of_tensor) for each in value])})"
        if isinstance(value, Mapping):
            return f"{{{', '.join([f'{name}: {self._described(value[name], of_tensor)}' for name in sorted(value)])}}}"
        return described(value)

    def _operand(self, tensor: torch.Tensor) -> str:
        if not is_plain(tensor) or not is_fake(tensor):
            raise NotKnown("forward computes with a tensor that is not plain and dense, or neither parameter, buffer nor input")
        return f"{self._place(tensor)} {tensor.requires_grad}"

    def _literal(self, tensor: torch.Tensor) -> str:
        if is_fake(tensor):
            return self._operand(tensor)
        self.literals.add(found := literal_line(tensor))
        return found

    def _call(self, name: str, tensor: torch.Tensor) -> None:
        for number in self.memory(tensor):
            self._names.setdefault(number, name)

    def _named(self, tensor: torch.Tensor) -> str:
        """Its form, and whose memory it lies in where that is no op's."""
        return f"{_form(tensor)} {self._name_of(tensor)}"

    def _name_of(self, tensor: torch.Tensor) -> str:
        return "".join(self._names.get(number, "") for number in self.memory(tensor))

    def _new(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)
        self._storages.setdefault(StorageWeakRef(tensor.untyped_storage()), len(self._storages))

    def _place(self, tensor: torch.Tensor) -> str:
        number = self._storages.get(StorageWeakRef(tensor.untyped_storage()))
        if number is None:
            raise NotKnown("forward computes with a tensor that no op has made")
        return f"%{number}+{tensor.storage_offset()}{tensor.stride()}{_form(tensor)}"

    def end(self, results: Sequence[torch.Tensor], names: Mapping[int, str]) -> None:
        """The results, and the graph of their backward; leaves of that are the parameters, by their `names`."""
        self.lines += [f"result {self._operand(each)}" for each in results]
        pending, seen = [each.grad_fn for each in results if each.grad_fn is not None], set[Any]()
        self.lines += [f"from {sequence_of(each.grad_fn) - self._first} {each.output_nr}" for each in results if each.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            self.lines.append(f"{node.name()} {sequence_of(node) - self._first} {self._next(node, names)}")
            pending += [each for each, _ in reversed(node.next_functions) if each is not None and not hasattr(each, "variable")]

    def _next(self, node: Any, names: Mapping[int, str]) -> list[tuple[Any, int]]:
        if is_custom(node):
            raise NotKnown("an autograd function of the user's")
        found: list[tuple[Any, int]] = []
        for each, place in node.next_functions:
            if each is None:
                found.append((None, place))
            elif hasattr(each, "variable"):
                if id(each.variable) not in names:
                    raise NotKnown("forward makes a tensor that asks for a gradient")
                found.append((names[id(each.variable)], place))
            else:
                found.append((sequence_of(each) - self._first, place))
        return found


def literal_line(tensor: torch.Tensor) -> str:
    """The numbers of a literal; on meta it has none."""
    with outside_fake_modes():
        numbers = None if tensor.is_meta else tensor.tolist()
        return f"literal {numbers}{_form(tensor)}"


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}"


def _autocasts() -> str:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return " ".join(f"{kind}:{torch.get_autocast_dtype(kind)}" for kind in kinds)
