"""Which gathers of parameters one fragment waits for at once, and what it runs then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import autopar
from autopar.graph import awaited_together as module
from autopar.graph.awaited_together import awaited_together
from autopar.graph.fragments import FragmentCutter
from autopar.graph.launch_operands import made_of_inputs
from autopar.ir.collectives import all_gather, all_reduce, wait
from autopar.ir.instructions import Run, Wait
from autopar.ir.keys import SOURCE, Source

aten = torch.ops.aten


class Residual(nn.Module):
    """Blocks of small parameters, biases among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Layers:
    """x + w + v + … in calls of one block each, `block` until another is named; parameters are gathered just before their reader."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.block = "layers.0"
        self.x = self.input("x")

    def input(self, name: str, size: int = 4) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(size)
        return node

    def call(self, target: Callable[..., Any], *arguments: Any, size: int = 4) -> Node:
        node = self.graph.call_function(target, arguments)
        node.meta["val"] = torch.empty(size)
        SOURCE[node] = Source(module=self.block)
        return node

    def whole(self, operand: Node, size: int = 4) -> Node:
        return self.call(wait, self.call(all_gather, operand, ("dp",), 2, size=size), size=size)

    def add(self, name: str, size: int = 4) -> None:
        self.x = self.call(aten.add.Tensor, self.x, self.whole(self.input(name), size))

    def reduce(self) -> None:
        self.x = self.call(wait, self.call(all_reduce, self.x, ("dp",), "sum"))

    def instructions(self) -> list[str]:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        self.graph.output((self.call(aten.neg.default, self.x),))  # by another section: a result alone is computed last
        section = FragmentCutter("cpu", {}).section(nodes, set())
        return [str(each).split(" (")[0] for each in section if isinstance(each, (Run, Wait))]

    def found(self) -> list[list[str]]:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        return [[each.args[0].name for each in waits] for waits in awaited_together(nodes, made_of_inputs(nodes), set()).values()]


def test_one_fragment_reads_what_a_block_needs_of_its_parameters() -> None:
    layers = Layers()
    for block, names in (("layers.0", "abc"), ("layers.1", "de")):
        layers.block = block
        for name in names:
            layers.add(name)
    assert layers.found() == [["all_gather_1", "all_gather_2"], ["all_gather_4"]]
    gathers = [f"WAIT all_gather{number}" for number in ("", "_1", "_2", "_3", "_4")]
    assert layers.instructions() == [*gathers[:3], "RUN f0", *gathers[3:], "RUN f1"]


def test_not_beyond_another_collective() -> None:
    layers = Layers()
    layers.add("a")
    layers.reduce()
    layers.add("b")
    layers.add("c")
    assert layers.instructions() == ["WAIT all_gather", "RUN f0", "WAIT all_reduce", "WAIT all_gather_1", "WAIT all_gather_2", "RUN f1"]


def test_what_is_computed_and_gathered_is_waited_for_where_it_is_read() -> None:
    layers = Layers()
    layers.add("a")
    layers.x = layers.call(aten.add.Tensor, layers.x, layers.whole(layers.call(aten.neg.default, layers.x)))
    assert layers.instructions() == ["WAIT all_gather", "RUN f0", "WAIT all_gather_1", "RUN f1"]


def test_no_more_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first reader's own there may be any number: it has to wait for them."""
    monkeypatch.setattr(module, "TOGETHER_BYTES", 32)
    layers = Layers()
    for name, size in (("a", 1000), ("b", 4), ("c", 4), ("d", 1), ("e", 1000), ("f", 4)):
        layers.add(name, size)
    assert layers.found() == [["all_gather_1", "all_gather_2"], ["all_gather_5"]]
    runs = [each for each in layers.instructions() if each.startswith("RUN")]
    assert len(runs) == 3


def test_a_block_under_zero_is_a_fragment_forward_and_one_backward() -> None:
    """What is laid out behind a gather is so in its reader's fragment: none is a reshape of a part alone."""
    batch = {"x": torch.randn(8, 8)}
    parallel = autopar.compile(Residual(), autopar.virtual_mesh(dp=2), example_inputs=batch, backend="eager", zero=3)
    schedule = parallel.compiled.schedule.schedule_of(0)
    runs = [each for each in schedule.instructions if isinstance(each, Run)]
    parts = {name for name in schedule.inputs if name.startswith("p_")}
    assert len(parts) == 18 and not any(parts.intersection(run.inputs) for run in runs)
    before_loss = [run for run in runs if any(name.startswith("all_gather") for name in run.inputs)]
    assert len(before_loss) <= 2 * 3 + 1, "one a block and phase, and the loss"
    assert parallel.verify(**batch)
