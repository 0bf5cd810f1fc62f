"""FORWARD programs in files, which all processes of a test run share: the four ranks of a test capture one model once, not four times.

A program is pickled but for what only its process has: ops and keys go by their names, fake tensors by shape, strides, dtype and storage,
nodes by their number. What cannot be pickled is not stored, and captured by every process for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import operator
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar._torch import FakeTensorMode, OpOverload
from autopar.driver import compiled
from autopar.driver.pickled import Pickler, Unpickler
from autopar.ir import keys
from autopar.ir.program import Program

# The environment's variable that names the folder; without it nothing is stored.
FOLDER = "AUTOPAR_TEST_CAPTURES"
# Of what torch notes about a node, what passes and the joint trace read.
_RECORDS = ("val", "stack_trace", "nn_module_stack", "seq_nr", "custom", "ac_graph_id", "partitioner_tag", "is_gradient_acc")
# Fields of a program that the joint trace hands on, and those that are described apart.
_APART = ("graph", "constants", "mesh", "freedom", "order")


# What `repr` gives of an object that means nothing to another process.
_OF_A_PROCESS = " at 0x"


class CannotBeStored(Exception):
    """Something of a program, or of what it is known by, means nothing to another process."""


def stored(key: Any, make: Callable[[], Program]) -> Program:
    """What `make()` gives, by whichever process asked first for something with an equal `key`."""
    folder, text = os.environ.get(FOLDER), described(key)
    if not folder or _OF_A_PROCESS in text:
        return make()
    path = Path(folder) / hashlib.sha256(text.encode()).hexdigest()
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by a process that ends
        if path.exists():
            return loaded(path.read_bytes())
        program = make()
        try:
            content = dumped(program)
            loaded(content)  # whoever reads it must be able to
            path.write_bytes(content)
        except (CannotBeStored, pickle.PicklingError, TypeError, AttributeError):
            pass
        return program


def described(value: Any) -> str:
    """`value` in words that are the same in another process, a class by file and name; else with an address."""
    if isinstance(value, (type, FunctionType)):
        return _place(value)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(described, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{described(key)}: {described(each)}' for key, each in value.items())}}}"
    if isinstance(value, torch.Tensor):
        return _shape(value)
    return repr(value)


def _place(kind: type | FunctionType) -> str:
    module = sys.modules.get(kind.__module__)
    found: Any = module
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not kind:  # made in a function, or there are two modules of this name
        return f"{kind.__qualname__}{_OF_A_PROCESS}{id(kind):x}"
    return f"{getattr(module, '__file__', '')}:{kind.__module__}.{kind.__qualname__}"


def content_of(program: Program) -> str:
    """A digest of all that the joint trace reads of a FORWARD program. Raises `CannotBeStored` for one that calls what is no op."""
    words = [described({each.name: getattr(program, each.name) for each in fields(program) if each.name not in _APART})]
    for name, tensor in program.constants.items():
        words.append(f"{name} {_shape(tensor)}")
    for node in program.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            raise CannotBeStored(node.target)
        words.append(f"{node.op} {node.name} {node.target} {described(node.args)} {described(node.kwargs)}")
        words += [f"{key} {described(node.meta[key])}" for key in node.meta if isinstance(key, keys.Key) or key in _RECORDS]
    text = "\n".join(words)
    return hashlib.sha256(text.encode()).hexdigest() + (f"{_OF_A_PROCESS}0" if _OF_A_PROCESS in text else "")


def _shape(value: torch.Tensor) -> str:
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.storage_offset()}{value.device}{value.requires_grad}"


# ---- pickles


class _Pickler(Pickler):
    """Writes several values one after another; nodes that were numbered go by their number."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbers: dict[Node, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return super().persistent_id(value)
        if value not in self.numbers:
            raise CannotBeStored(f"{value} is of another graph")
        return self.numbers[value]

    def reducer_override(self, value: Any) -> Any:
        if value is compiled.TENSOR:
            return _tensor_leaf, ()
        if isinstance(value, (Graph, FakeTensorMode)):
            raise CannotBeStored(repr(type(value)))
        return super().reducer_override(value)


class _Unpickler(Unpickler):
    nodes: list[Node]

    def persistent_load(self, pid: Any) -> Any:
        return self.nodes[pid] if isinstance(pid, int) else super().persistent_load(pid)


def dumped(program: Program) -> bytes:
    """`program` as bytes. Raises `CannotBeStored`, or what pickle raises."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(len(program.graph.nodes))
    for number, node in enumerate(program.graph.nodes):
        records = {key: value for key, value in node.meta.items() if isinstance(key, keys.Key) or key in _RECORDS}
        pickler.dump((node.op, node.name, node.target, node.args, node.kwargs, records))
        pickler.numbers[node] = number
    pickler.dump({each.name: getattr(program, each.name) for each in fields(program) if each.name != "graph"})
    return file.getvalue()


def loaded(content: bytes) -> Program:
    """The program that `dumped` gave as `content`, its fake tensors in a mode of their own."""
    unpickler, graph = _Unpickler(content), Graph()
    unpickler.nodes = []
    for _ in range(unpickler.load()):
        op, name, target, args, kwargs, records = unpickler.load()
        node = graph.create_node(op, target, args, kwargs)
        node.name, node.meta = name, records
        unpickler.nodes.append(node)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, for the structures of outputs
        return Program(graph=graph, **unpickler.load())


def _tensor_leaf() -> Any:
    return compiled.TENSOR
