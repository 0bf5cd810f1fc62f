"""Parameters that do not train and that forward writes: momentum teachers, by all the ways in which people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import Mesh
from autopar.errors import AutoparError, CaptureError, PlanError
from autopar.frontend.capture import capture
from tests.support.captures import compiled

X, Y = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def given_other_data(student: Tensor, teacher: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


def written_through_data(student: Tensor, teacher: Tensor) -> None:
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def copied(student: Tensor, teacher: Tensor) -> None:
    teacher.copy_(0.9 * teacher + 0.1 * student)


def in_lists(student: Tensor, teacher: Tensor) -> None:
    torch._foreach_mul_([teacher], 0.9)
    torch._foreach_add_([teacher], [student], alpha=0.1)


def row_by_row(student: Tensor, teacher: Tensor) -> None:
    for row in range(2):
        teacher[row::2] = torch.lerp(teacher[row::2], student[row::2], 0.1)


Update = Callable[[Tensor, Tensor], None]


class Momentum(nn.Module):
    """A student, and a teacher that is its moving average: in training each call moves it first, or last."""

    def __init__(self, update: Update = given_other_data, is_last: bool = False) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.update, self.is_last = update, is_last

    @torch.no_grad()
    def move(self) -> None:
        for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            self.update(student, teacher)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and not self.is_last:
            self.move()
        student = self.student(x)
        with torch.no_grad():
            teacher = self.teacher(y)
        if self.training and self.is_last:
            self.move()
        return (student - teacher).square().mean()


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 3) -> list[float]:
    """The losses of `steps`, and of evaluations between them, which move nothing."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = list[float]()
    for _ in range(steps):
        loss = model.train()(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [float(loss.detach()), float(model.eval()(x, y))]
    return losses


def require_same(parallel: Any, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(parallel.full_state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("update", [given_other_data, written_through_data, copied, in_lists, row_by_row])
def test_a_teacher_moves(update: Update) -> None:
    torch.manual_seed(0)
    model = Momentum(update).double()
    parallel = compiled(copy.deepcopy(model), {"dp": 2, "tp": 2}, (X, Y))
    torch.testing.assert_close(trained(parallel, X, Y), trained(model, X, Y), rtol=1e-9, atol=1e-12)
    require_same(parallel, model)
    assert parallel.train().verify(X, Y)
    assert "student.0.weight" in str(parallel.explain())


@pytest.mark.parametrize("axes, options", [
    ({"dp": 2}, {"zero": 3, "recompute": "full"}), ({"pp": 2}, {"num_microbatches": 4}), ({"tp": 2}, {"num_microbatches": 4}),
])  # fmt: skip
def test_it_moves_beside_what_else_is_asked_for(axes: Mapping[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Momentum().double()
    parallel = compiled(copy.deepcopy(model), axes, (X, Y), **options)
    torch.testing.assert_close(trained(parallel, X, Y), trained(model, X, Y), rtol=1e-9, atol=1e-12)
    require_same(parallel, model)


def test_a_first_call_may_only_read_it() -> None:
    torch.manual_seed(0)
    model = Momentum(is_last=True).double()
    parallel = compiled(copy.deepcopy(model).eval(), {"dp": 2, "tp": 2}, (X, Y))
    torch.testing.assert_close(trained(parallel, X, Y), trained(model, X, Y), rtol=1e-9, atol=1e-12)
    require_same(parallel, model)


def test_looking_at_a_step_does_not_move_it() -> None:
    torch.manual_seed(0)
    parallel = compiled(Momentum().double(), {"dp": 2}, (X, Y))
    before = copy.deepcopy(parallel.state_dict())
    parallel.verify(X, Y)
    parallel.timeline(X, Y)
    parallel.profile(X, Y, steps=1)
    for name, value in parallel.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_in_lower_precision_it_moves_in_its_own() -> None:
    for update in (given_other_data, copied, written_through_data):
        torch.manual_seed(0)
        model = Momentum(update)
        with torch.no_grad():
            for parameter in model.student.parameters():
                parameter.add_(torch.randn_like(parameter))
        parallel = compiled(copy.deepcopy(model), {"dp": 2}, (X.float(), Y.float()), precision="bf16")
        parallel(X.float(), Y.float())
        model.move()
        for moved, wanted in zip(parallel.teacher.parameters(), model.teacher.parameters(), strict=True):
            torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=1e-7)


def test_it_is_a_buffer_of_the_program_behind_the_parameters() -> None:
    program = capture(Momentum().double(), (X, Y), {}, Mesh((("dp", 1),)))
    kinds = [(item.kind, item.is_parameter) for item in program.signature.inputs]
    assert kinds == [("parameter", False)] * 6 + [("buffer", True)] * 6 + [("batch", False)] * 2


class OldRead(nn.Module):
    """What the parameter was is read once it is given other data: there the old data are still."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            old = self.frozen.data
            self.frozen.data = 0.5 * self.frozen.data
            moved = (self.frozen - old).abs().mean()
        return (self.layer(x) @ self.frozen).square().mean() * moved


class NewRead(OldRead):
    """The new data are read by another name, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            new = 0.5 * self.frozen
            self.frozen.data = new
        return (self.layer(x) @ new).square().mean()


class OfAnother(OldRead):
    """The data are those of a parameter that trains, and would follow it."""

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.data = self.layer.weight.data
        return (self.layer(x) @ self.frozen).square().mean()


@pytest.mark.parametrize("kind", [OldRead, NewRead, OfAnother])
def test_data_that_somebody_else_reads_are_refused(kind: type[OldRead]) -> None:
    with pytest.raises(CaptureError, match="gives a tensor other data.*and nothing else reads the old"):
        compiled(kind().double(), {"dp": 2}, (X,))


def test_a_pin_cannot_split_it() -> None:
    parallel = compiled(Momentum().double(), {"dp": 2, "tp": 2}, (X, Y), pins={"teacher.0.weight": (None, None)})
    with pytest.raises(AutoparError, match="'teacher.0.weight' is written by forward, and lies whole on each rank"):
        parallel.why("teacher.0.weight")
    with pytest.raises(PlanError, match=r"'teacher.0.weight' \('tp', None\): forward writes into it, and .* lies whole on each rank"):
        compiled(Momentum().double(), {"dp": 2, "tp": 2}, (X, Y), pins={"teacher.0.weight": ("tp", None)})
