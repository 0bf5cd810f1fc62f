"""Forward asks how an input lies: of one that lies otherwise than row by row it is refused, unless it is copied first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.support.models.layer import Layer

Asking = Callable[[Tensor, nn.Module], Tensor]


class Asks(nn.Module):
    def __init__(self, ask: Asking) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(x, self.linear).square().mean()


def by_layout(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) if x.is_contiguous() else 2 * linear(x)


def by_layout_of_a_view(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) * x.unsqueeze(0).stride(1)


def addressed(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) + torch.as_strided(x, (4, 8), (1, 4))


def written_in_a_row(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.reshape(-1)[::3] = 0
    return linear(y)


def written_turned(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    turned = y.t().contiguous()
    turned[0] = 0
    return linear(y + turned.t())


def by_layout_of_what_is_computed(x: Tensor, linear: nn.Module) -> Tensor:
    y = 2 * x
    return linear(y) if y.is_contiguous() else 2 * linear(y)


def by_strides_of_what_is_computed(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x) * torch.tanh(x).stride(1)


def addressed_once_computed(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(torch.as_strided(torch.tanh(x), (4, 8), (8, 1)))


def copy_written(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    rows = y.contiguous()
    rows[:, 0] = 0
    return linear(y + rows)


def copied_then_written(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.empty_like(x).copy_(x)
    rows = y.unsqueeze(0).contiguous().float()
    y[:, 0] = 0
    return linear(y + rows[0])


def raveled_and_written(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.ravel()[:3] = 0
    return linear(y)


def raveled_row_written(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y[0].ravel()[:3] = 0
    return linear(y)


def copied(x: Tensor, linear: nn.Module) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    return linear(x)


def addressed_once_copied(x: Tensor, linear: nn.Module) -> Tensor:
    x = x.contiguous()
    return linear(x) + x.as_strided((4, 8), (1, 4)) * x.stride(0)


def not_of_inputs(x: Tensor, linear: nn.Module) -> Tensor:
    y = linear(x)
    return y if y.is_contiguous() else 2 * y


def copied_once_computed(x: Tensor, linear: nn.Module) -> Tensor:
    y = 2 * x
    return linear(y if y.is_contiguous() else y.contiguous())


def only_the_copy_is_read(x: Tensor, linear: nn.Module) -> Tensor:
    rows = torch.tanh(x).contiguous()
    rows[:, 0] = 0
    return linear(rows)


def asked_of_what_is_in_rows(x: Tensor, linear: nn.Module) -> Tensor:
    y = linear(x)
    return y * y.stride(0) if y.is_contiguous() else y


def detached_by_both_names(x: Tensor, linear: nn.Module) -> Tensor:
    y = linear(x)
    rows = y.contiguous()
    y.detach_()
    return rows.square() + linear(x)


def detached_as_a_cast(x: Tensor, linear: nn.Module) -> Tensor:
    y = linear(x)
    same = y.float()
    y.detach_()
    return same.square() + linear(x)


def written_beside_a_row_that_is_turned(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    rows, first = y.contiguous(), y[0]
    first.unsqueeze_(0)
    rows[:, 0] = 0
    return linear(y) + first.sum()


def only_the_copy_is_turned(x: Tensor, linear: nn.Module) -> Tensor:
    rows = torch.tanh(x).contiguous()
    rows.unsqueeze_(0)
    return linear(rows)


def check(ask: Asking, *batches: Tensor) -> None:
    torch.manual_seed(0)
    model = Asks(ask)
    plain, parallel = copy.deepcopy(model), autopar.compile(model, autopar.virtual_mesh(dp=2), backend="eager")
    for x in batches:
        losses = parallel(x), plain(x)
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("ask", [
    by_layout, by_layout_of_a_view, addressed, written_in_a_row, written_turned, by_layout_of_what_is_computed,
    by_strides_of_what_is_computed, addressed_once_computed, copy_written, copied_then_written, raveled_and_written, raveled_row_written,
    written_beside_a_row_that_is_turned,
])  # fmt: skip
def test_what_lies_otherwise_is_refused(ask: Asking) -> None:
    for x in (torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2]):
        check(ask, torch.randn(4, 8))
        with pytest.raises(autopar.InputError, match=r"how 'args\[0\]' lies in memory.*\n  where: .*test_asked_layouts.py:\d+"):
            check(ask, x)
        with pytest.raises(autopar.InputError, match="lies in memory"):
            check(ask, torch.randn(4, 8), x)


def written_before_it_is_turned(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x).reshape(-1)
    y[::3] = 0
    return linear(y.view(4, 8).relu_().t().contiguous().mul_(2).t())


def written_in_parts(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.reshape(4, 2, 4)[:, 0] = 0
    return linear(y)


@pytest.mark.parametrize("ask", [
    copied, addressed_once_copied, not_of_inputs, written_before_it_is_turned, written_in_parts, copied_once_computed,
    only_the_copy_is_read, asked_of_what_is_in_rows, detached_by_both_names, detached_as_a_cast,
    only_the_copy_is_turned,
])  # fmt: skip
def test_where_it_makes_no_difference_any_layout_is_taken(ask: Asking) -> None:
    check(ask, torch.randn(4, 8), torch.randn(8, 4).t(), torch.randn(4, 16)[:, ::2])
    check(ask, torch.randn(8, 4).t(), torch.randn(4, 8))


def turned_as_an_input(x: Tensor, linear: nn.Module) -> Tensor:
    x.contiguous().t_()
    return linear(x)


def turned_as_a_copy(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    y.contiguous().t_()
    return linear(y)


def turned_under_a_copy(x: Tensor, linear: nn.Module) -> Tensor:
    y = torch.tanh(x)
    rows = y.contiguous()
    y.t_()
    return linear(rows)


@pytest.mark.parametrize("ask", [turned_as_an_input, turned_as_a_copy, turned_under_a_copy])
def test_a_copy_that_may_be_its_operand_and_is_turned_in_place(ask: Asking) -> None:
    with pytest.raises(autopar.errors.CaptureError, match=r"aten\.t_\.default.*one tensor, or two\n  where: .*test_asked_layouts.py:\d+"):
        check(ask, torch.randn(8, 8))


def test_a_number_is_reshaped_beside_writes() -> None:
    x = torch.randn(8, 4)
    model = Layer(lambda self, x: self.linear(x).add_(1).square().mean() + x.sum().reshape(1).flatten().mean())
    assert autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager").verify(x)


def to_images(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    images = y.to(memory_format=torch.channels_last)
    images[:, 0] = 0
    return y + images


def to_rows(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    rows = y.to(torch.float32, memory_format=torch.contiguous_format)
    rows[:, 0] = 0
    return y + rows


def told_of_images(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    return 2 * y if y.is_contiguous(memory_format=torch.channels_last) else y


def cast_to_images(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    images = y.to(torch.float64, memory_format=torch.channels_last)
    images[:, 0] = 0
    return y + images.float()


@pytest.mark.parametrize("compute, is_refused", [(to_images, True), (to_rows, True), (told_of_images, True), (cast_to_images, False)])
def test_what_lies_channels_last(compute: Callable[[Tensor], Tensor], is_refused: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 4, 4, 4), Layer(lambda self, x: self.linear(compute(x)).square().mean())
    plain, parallel = copy.deepcopy(model), autopar.compile(model, autopar.virtual_mesh(dp=2), backend="eager")
    torch.testing.assert_close(parallel(x), plain(x))
    if is_refused:
        with pytest.raises(autopar.InputError, match="lies in memory"):
            parallel(x.to(memory_format=torch.channels_last))
    else:
        torch.testing.assert_close(parallel(x.to(memory_format=torch.channels_last)), plain(x))


def test_a_view_of_an_input_that_is_turned() -> None:
    x = torch.randn(4, 8).t()
    model = Layer(lambda self, x: self.linear(x.t().view(-1).view(8, 4)).square().mean())
    model(x)
    with pytest.raises(autopar.errors.CaptureError, match=r"reshape\(...\) in place of .view\(...\); a program takes inputs row by row"):
        autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
