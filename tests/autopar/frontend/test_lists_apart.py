"""Calls on lists of tensors are calls on one tensor each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.frontend.lists_apart import lists_taken_apart
from autopar.ir.mesh import virtual_mesh
from tests.autopar.frontend.test_frozen_writes import X, Y, require_same, trained
from tests.support.captures import compiled
from tests.support.ranks import GlooRanks, share

aten = torch.ops.aten
Lists = Callable[[list[Tensor], list[Tensor], Tensor], Any]


class Moved(nn.Module):
    """A student, and a teacher and a queue that `move(students, teachers, queue)` writes."""

    def __init__(self, move: Lists) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", torch.randn(6, 8))
        self.move = move

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.move(list(self.student.parameters()), list(self.teacher.parameters()), self.queue)
            teacher = self.teacher(y)
        student = self.student(x)
        return (student - teacher).square().mean() + (student @ self.queue.t()).square().mean()


def averaged(students: list[Tensor], teachers: list[Tensor], queue: Tensor) -> None:
    torch._foreach_mul_(teachers, 0.9)
    torch._foreach_add_(teachers, students, alpha=0.1)


def twice_in_a_list(students: list[Tensor], teachers: list[Tensor], queue: Tensor) -> None:
    torch._foreach_lerp_([*teachers, *teachers[:2]], [*students, *students[:2]], [0.1] * 8)


def parts_of_one(students: list[Tensor], teachers: list[Tensor], queue: Tensor) -> None:
    flat, old = queue.view(-1), queue.clone()
    torch._foreach_mul_([*queue.unbind(0), teachers[0][::2]], 0.9)
    torch._foreach_add_([queue[:3], queue[2:5].t(), flat], [old[:3], old[:3].t(), flat.flip(0)], alpha=0.1)


def of_each_other(students: list[Tensor], teachers: list[Tensor], queue: Tensor) -> None:
    torch._foreach_add_([teachers[1], queue[0]], [teachers[3], teachers[5]])
    torch._foreach_copy_([teachers[3], teachers[1]], torch._foreach_mul([teachers[1], teachers[3]], 0.5))


MOVES: tuple[Lists, ...] = (averaged, twice_in_a_list, parts_of_one, of_each_other)


@pytest.mark.parametrize("axes, options", [({"dp": 2, "tp": 2}, {}), ({"dp": 2}, {"zero": 3})])
@pytest.mark.parametrize("move", MOVES)
def test_what_is_in_a_list_is_written_once_it_comes_to_it(move: Lists, axes: Mapping[str, int], options: dict[str, Any]) -> None:
    model = Moved(move).double()
    parallel = compiled(copy.deepcopy(model), axes, (X, Y), **options)
    torch.testing.assert_close(trained(parallel, X, Y), trained(model, X, Y), rtol=1e-9, atol=1e-12)
    require_same(parallel, model)


def on_a_process(number: int) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch, model = share({"x": X, "y": Y}, mesh), Moved(MOVES[number]).double()
    parallel = compiled(copy.deepcopy(model), mesh, (batch["x"], batch["y"]), timeout=180)
    losses = trained(parallel, batch["x"], batch["y"]), trained(model, X, Y)
    require_same(parallel, model)
    return losses


@pytest.mark.ranks
def test_so_it_is_on_processes(gloo_ranks: GlooRanks) -> None:
    for number in range(len(MOVES)):
        for found, wanted in gloo_ranks.run(on_a_process, number):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Computes(nn.Module):
    """The sum of what `compute` makes of lists, and of what it leaves of the first."""

    def __init__(self, compute: Lists) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute = nn.Linear(8, 8), compute

    def forward(self, x: Tensor) -> Tensor:
        first, second = [self.linear(x).sigmoid() + 0.5, x.abs() + 0.1], [x.sigmoid() + 0.5, x.cos() + 2]
        made = self.compute(first, second, x.square().sum())
        return sum((each.square().sum() * (1 + place) for place, each in enumerate([*(made or ()), *first])), torch.zeros(()))


@pytest.mark.parametrize("compute", [
    lambda a, b, c: torch._foreach_add(a, b, alpha=0.5), lambda a, b, c: torch._foreach_add_(a, c, alpha=0.5),
    lambda a, b, c: torch._foreach_sub_(a, [0.5, 2]), lambda a, b, c: torch._foreach_div(a, b), lambda a, b, c: torch._foreach_neg_(a),
    lambda a, b, c: torch._foreach_pow(a, b), lambda a, b, c: torch._foreach_pow(2, a), lambda a, b, c: torch._foreach_pow_(a, 3),
    lambda a, b, c: torch._foreach_lerp(a, b, b), lambda a, b, c: torch._foreach_lerp(a, b, 0.3),
    lambda a, b, c: torch._foreach_addcmul_(a, b, b, 0.3), lambda a, b, c: torch._foreach_addcdiv(a, b, b, [0.5, 2]),
    lambda a, b, c: torch._foreach_maximum(a, b), lambda a, b, c: torch._foreach_minimum(a, 1), lambda a, b, c: torch._foreach_zero_(a[1:]),
    lambda a, b, c: torch._foreach_clamp_max_(a, 1), lambda a, b, c: torch._foreach_norm(a, 1, torch.float64),
])  # fmt: skip
def test_lists_are_what_their_elements_are(compute: Lists) -> None:
    model, x = Computes(compute).double(), X
    assert not [node for node in capture(model, (x,), {}, virtual_mesh(dp=2)).graph.nodes if "foreach" in str(node.target)]
    parallel = compiled(copy.deepcopy(model), {"dp": 2}, (x,))
    losses = parallel(x), model(x)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(parallel.get_parameter("linear.weight").grad, model.linear.weight.grad)


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            h = self.linear(x)
            return h.exp().mean() + torch._foreach_exp([h])[0].mean()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_under_an_autocast_lists_are_not_cast() -> None:
    graph = capture(UnderAutocast().to("meta"), (X.float(),), {}, virtual_mesh(dp=2)).graph
    called = graph.find_nodes(op="call_function", target=aten.exp.default)
    assert [node.meta["val"].dtype for node in called] == [torch.float32, torch.bfloat16]


def test_what_has_no_form_of_one_tensor_is_refused() -> None:
    graph = Graph()
    graph.call_function(aten._foreach_powsum.Scalar, ([graph.placeholder("x")],))
    with pytest.raises(
        CaptureError, match="aten._foreach_powsum.Scalar, which autopar does not take apart.*\n  where.*\n.*loop over the list"
    ):
        lists_taken_apart(graph)
