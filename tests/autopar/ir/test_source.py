"""Where nodes come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from autopar.frontend.capture import capture
from autopar.ir.keys import PHASE, SOURCE, Source
from autopar.ir.mesh import virtual_mesh
from autopar.ir.source import is_library, module_calls, source_of, user_frames
from autopar.passes.global_.trace_joint import TraceJoint

TORCH_FILE = os.path.join(os.path.dirname(torch.__file__), "nn", "functional.py")
TRACE = f"""
  File "/home/me/model.py", line 12, in forward
    return self.block(x)
  File "/home/me/block.py", line 7, in forward
    h = F.relu(x)
  File "{TORCH_FILE}", line 99, in relu
    result = torch.relu(input)
"""


def node_with(**meta: object) -> Node:
    node = Graph().call_function(torch.relu)
    node.meta |= meta
    return node


def test_the_source_is_the_innermost_line_outside_of_torch() -> None:
    assert source_of(node_with(stack_trace=TRACE)) == Source("/home/me/block.py", 7, "h = F.relu(x)", "")
    assert [frame.line for frame in user_frames(TRACE)] == [12, 7]


def test_without_a_record_there_is_no_source() -> None:
    assert source_of(node_with()) == Source()
    assert str(source_of(node_with())) == "(no source line)"
    assert source_of(node_with(stack_trace=None, nn_module_stack={})) == Source()


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("L['self'].model.h[0].mlp", "h.0.mlp"),
        ("L['self']._export_root.model.layers.1.norm", "layers.1.norm"),
        ("L['self'].model._modules['h'][3]", "h.3"),
        ("L['self'].model", ""),
        ("L['self'].model.models.0", "models.0"),
    ],
)
def test_module_paths_are_the_users(path: str, module: str) -> None:
    stack = {"outer": ("L['self']", nn.Module), "inner": (path, nn.Module)}
    assert source_of(node_with(nn_module_stack=stack), "model.").module == module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_sources_reach_the_backward() -> None:
    program = TraceJoint().apply(capture(Model(), (torch.randn(8, 4),), {}, virtual_mesh(dp=2)))
    products = [node for node in program.graph.nodes if node.target is torch.ops.aten.mm.default]
    modules = {phase: {SOURCE[node].module for node in products if PHASE[node] == phase} for phase in ("forward", "backward")}
    linears = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
    assert modules == {"forward": linears, "backward": linears}
    assert all(SOURCE[node].file == __file__ for node in products)


def test_the_calls_that_a_node_is_computed_in() -> None:
    paths = {"0": "L['self']", "1": "L['self'].model", "2@1": "L['self'].model.model", "3@4": "L['self'].model.model.h[0]"}
    node = node_with(nn_module_stack={key: (path, nn.Module) for key, path in paths.items()})
    assert module_calls(node) == {"model": "1", "model.h.0": "4"}
    assert module_calls(node_with(fwd_nn_module_stack={"7": ("L['self'].model.norm", nn.Module)})) == {"norm": ""}
    lone = node_with()
    SOURCE[lone] = Source(module="head")
    assert module_calls(lone) == {"head": ""} and module_calls(node_with()) == {}


def test_what_was_installed_into_a_folder_is_a_library(tmp_path: Path) -> None:
    (tmp_path / "einops-0.8.dist-info").mkdir()
    (tmp_path / "einops-0.8.dist-info" / "RECORD").write_text("einops/__init__.py,sha256=x,1\neinops/layers/torch.py,sha256=x,1\n")
    assert is_library(str(tmp_path / "einops" / "layers" / "torch.py"))
    assert not is_library(str(tmp_path / "model.py")) and not is_library(str(tmp_path / "einops" / "mine.py"))
    assert not is_library("") and not is_library("<string>")
