"""A small compiled model to plant faults into, and what planting takes.

The model is small enough to read: an embedding, a norm, two layers split by column and by row, a head split over the
vocabulary, and cross entropy over labels of which the ranks have unequal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional as F

from autopar._torch import fake_mode
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.compiled import Compiled
from autopar.driver.manager import History, run_passes
from autopar.frontend.capture import capture
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_gather, all_reduce
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Form, Program
from autopar.passes.forward.key_captured import key_captured
from autopar.passes.forward.key_random import number_sites
from autopar.plans.pins import Pins
from autopar.runtime.verify.compare_forms import verify_compiled
from autopar.runtime.verify.report import Report

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
    """`model(dropout)` on MESH, in plain ops: more places for faults. The pass `faulty` runs right after the one of type `after`."""
    history = History()
    passes: list[Any] = []
    for each in default_passes(Options(Cluster.ideal(), pins=MEGATRON, kernels="off"), True, None):
        passes += [each, faulty] if after is not None and isinstance(each, after) else [each]
    schedule = run_passes(number_sites(capture(model(dropout), (), dict(batch()), MESH)), passes, [history])
    last = {step.program.form: step.program for step in history.graph_steps}
    return Compiled.of(last[Form.FORWARD], last[Form.GLOBAL], last[Form.LOCAL], schedule, steps=history.graph_steps, keyed=key_captured)


def verified(compiled: Compiled, dropout: float = 0.0) -> Report:
    return verify_compiled(model(dropout), compiled, (), dict(batch()), promote=True, key=1234567890123)


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


def gathered(program: Program) -> Node:
    return first(program, lambda node: node.target is all_gather and node.meta["val"].is_floating_point())
