"""Graph modules that write their code late compute, print and change as others do."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from autopar.graph.late_code import code_written_late


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


def late() -> GraphModule:
    with code_written_late():
        return symbolic_trace(Net())


def test_it_computes_what_its_graph_says() -> None:
    module, x = late(), torch.arange(3.0)
    assert torch.equal(module(x), x * 2 + 1)
    assert torch.equal(module(x), x * 2 + 1)


def test_its_code_is_there_when_it_is_read() -> None:
    assert late().code == symbolic_trace(Net()).code


def test_a_change_of_the_graph_is_seen_once_it_is_compiled_again() -> None:
    module, x = late(), torch.arange(3.0)
    assert torch.equal(module(x), x * 2 + 1)
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul) or [
        node for node in module.graph.nodes if "mul" in node.name
    ]
    product.args = (product.args[0], 5)
    with code_written_late():
        module.recompile()
    assert torch.equal(module(x), x * 5 + 1)
    assert "5" in module.code


def test_copies_compute_as_well() -> None:
    module, x = copy.deepcopy(late()), torch.arange(3.0)
    assert torch.equal(module(x), x * 2 + 1)


def test_others_write_theirs_at_once_afterwards() -> None:
    late()
    assert "_code" in vars(symbolic_trace(Net()))
