"""What is known before the first microbatch, what joins several, what is summed when all have run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.graph.microbatches import is_summed_later, known_ahead, mixing_launches, summed, summed_later
from autopar.ir.collectives import all_reduce, is_launch
from autopar.ir.mesh import MICROBATCHES, virtual_mesh
from autopar.ir.program import Program
from autopar.ir.sharding import Sharding
from autopar.passes.local.lower import Lower
from tests.support.programs import passed


class Weighted(nn.Module):
    """A loss over a count of labels; batch norm where `norm` is given."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(torch.tanh(self.norm(self.first(x)))), y)


def local(norm: bool = False, **axes: int) -> Program:
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    return passed(Weighted(norm), (x, y), Lower, virtual_mesh(**(axes or {"pp": 2})), 4)


def test_counts_of_labels_are_known_ahead_and_what_the_network_makes_is_not() -> None:
    program = local(dp=2)
    ahead = known_ahead(program)
    labels = next(node for item, node in program.named_inputs() if (item.kind, item.name) == ("batch", "1"))
    parameters = {node for item, node in program.named_inputs() if item.kind == "parameter"}
    assert labels in ahead and not parameters & ahead
    counts = [node for node in program.graph.nodes if is_launch(node) and MICROBATCHES in node.args[1]]
    assert counts and set(counts) <= ahead, "the count of labels is the one sum that microbatches read"
    products = [node for node in program.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert products and not ahead.intersection(products)


def test_a_batch_norm_joins_microbatches_and_nothing_else_does() -> None:
    assert not mixing_launches(local())
    found = mixing_launches(local(norm=True))
    assert found and all(node.target is all_reduce and node.args[1] == (MICROBATCHES,) for node in found)


def test_running_statistics_are_not_known_ahead() -> None:
    program = local(norm=True)
    ahead = known_ahead(program)
    buffers = [node for item, node in program.named_inputs() if item.kind == "buffer" and "running" in item.name]
    assert buffers and not ahead.intersection(buffers)


def test_gradients_are_summed_when_all_have_run() -> None:
    for item in local().signature.outputs:
        assert item.sharding is not None and is_summed_later(item.sharding) == (item.kind in ("loss", "gradient"))


def test_a_sum_that_is_to_come_and_one_that_is_taken() -> None:
    whole = Sharding(((), ()), (("tp", "sum"),))
    later = summed_later(whole)
    assert is_summed_later(later) and not is_summed_later(whole)
    assert summed(later) == whole == summed(whole)
    assert not is_summed_later(Sharding(((),), ((MICROBATCHES, "max"),)))
