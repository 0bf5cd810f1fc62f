"""Whose memory results lie in."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar.cost.fragment_places import device_of, lies_with
from autopar.ir.schedule import Fragment

aten = torch.ops.aten


def fragment(device: str) -> Fragment:
    """x → x + positions made on `device`, x as a row; x is captured on the CPU whatever it is on."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    made = graph.call_function(aten.arange.default, (3,), {"device": torch.device(device)})
    graph.output((graph.call_function(aten.add.Tensor, (x, made)), graph.call_function(aten.view.default, (x, [6]))))
    return Fragment("f0", GraphModule(torch.nn.Module(), graph))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fragment_is_followed_on_its_own_device(device: str) -> None:
    found = fragment(device)
    assert device_of(found.module).type == device
    assert lies_with(found) == (1, 0), "the sum is its own, the row lies in x"
