"""A promoted program computes the same in float64, and the original model can be made to do so alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import autopar
from autopar.checks.program import check_program
from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import History, run_passes
from autopar.frontend.capture import capture
from autopar.graph.promote import Promoting, default_float64, promote, promote_schedule, promote_tensor, promoted_dtype
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Form, Program
from autopar.runtime.verify.copied_model import copy_model
from tests.support.schedules import scheduled

LOWER = (torch.float32, torch.float16, torch.bfloat16)


class Casting(nn.Module):
    """Casts to lower dtypes whatever its weights are, as language models do in norms, rotary angles and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.register_buffer("scale", torch.rand(6))
        self.shift = torch.linspace(0, 1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(0, 6, dtype=torch.float32) / 6
        x = (x.float() * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        x = self.last(F.gelu(self.first(x * self.scale + self.shift))) * angles
        weights = F.softmax(x, dim=-1, dtype=torch.float32).to(torch.bfloat16).type(torch.float32)
        return (weights * torch.ones(6, dtype=torch.float16)).sum() / x.shape[0]


def programs() -> dict[Form, Program]:
    history = History()
    forward = capture(Casting(), (torch.zeros(4, 6),), {}, virtual_mesh(dp=2, tp=2))
    run_passes(forward, default_passes(Options(Cluster.ideal()), True, None), [history])
    return {step.program.form: step.program for step in history.graph_steps}


def dtypes(program: Program) -> set[torch.dtype]:
    """Of all values, inputs, outputs and literals."""
    found = {item.dtype for item in (*program.signature.inputs, *program.signature.outputs)}
    for node in program.graph.nodes:
        found |= {leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.dtype)}
        value = node.meta.get("val")
        found |= {each.dtype for each in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(each, torch.Tensor)}
    return found


@pytest.fixture(scope="module")
def forms() -> dict[Form, Program]:
    return programs()


@pytest.mark.parametrize("form", list(Form), ids=lambda form: form.value)
def test_a_promoted_program_is_sound_and_has_no_lower_float_left(forms: dict[Form, Program], form: Form) -> None:
    before = forms[form]
    promoted = promote(before)
    assert dtypes(before) & set(LOWER) and not dtypes(promoted) & set(LOWER)
    assert dtypes(before) - set(LOWER) <= dtypes(promoted) | {torch.float64}
    with default_float64():
        assert check_program(promoted) == []
    assert [node.name for node in promoted.graph.nodes] == [node.name for node in before.graph.nodes]
    assert torch.bfloat16 in dtypes(before), "the program given is left as it was"


def test_the_promoted_program_equals_the_promoted_model_and_the_plain_one_does_not(forms: dict[Form, Program]) -> None:
    torch.manual_seed(0)
    model, x = Casting(), torch.randn(4, 6, dtype=torch.float64)
    tensors = {id(value): promote_tensor(value) for value in (*model.parameters(), *model.buffers())}
    exact = copy_model(model, tensors, promoted=True)
    program = promote(forms[Form.FORWARD])
    state = dict(exact.named_parameters()) | dict(exact.named_buffers())
    values = {"parameter": state.get, "buffer": state.get, "batch": lambda _: x, "constant": program.constants.get}
    with default_float64(), Promoting(), torch.no_grad():
        wanted = exact(x)
    with default_float64(), torch.no_grad():
        (found,) = program.module()(*(values[item.kind](item.name) for item in program.signature.inputs))
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    plain = model(x.float()).double()
    assert abs(plain - wanted) > 1e-6 * abs(wanted), "the casts are real: without promotion they show"


def test_every_way_to_ask_for_a_lower_dtype_gives_float64() -> None:
    with default_float64(), Promoting():
        x = torch.ones(3)
        asked = (
            x.float(),
            x.half(),
            x.bfloat16(),
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            x.type(torch.float16),
            x.softmax(0, dtype=torch.float32),
            F.softmax(x, 0, dtype=torch.float32),
            x.sum(dtype=torch.float32),
            torch.zeros(3, dtype=torch.float32),
            torch.arange(3, dtype=torch.float32),
            torch.tensor(1.0, dtype=torch.bfloat16),
            x.new_zeros(2, dtype=torch.float16),
            torch.arange(3) / 2,
        )
        kept = (torch.arange(3), x.to(torch.int32), x > 0)
    assert {tensor.dtype for tensor in asked} == {torch.float64}
    assert [tensor.dtype for tensor in kept] == [torch.int64, torch.int32, torch.bool]


def constants(x: torch.Tensor) -> list[torch.Tensor]:
    """Numbers that a capture makes constants of, in the dtype that they have here: float32 by default, bfloat16 as `x` is, and as asked."""
    ones, wide, cast, low, like = torch.ones(1, 2), torch.ones(1, 2).double(), x.float(), x.clone(), torch.ones(1, 2, dtype=x.dtype)
    for tensor in (ones, wide, cast, low, like):
        tensor[[0], [0]] = 0.3  # before torch 2.15 `tensor[0, 0]` makes one, too
    made = [torch.tensor(0.3), torch.as_tensor([0.3]), torch.asarray(0.3), torch.tensor(0.3, dtype=torch.float16), torch.tensor(0.3j)]
    likes = [x.new_tensor([0.3, 0.7]), x.new([0.3]), x.float().new_tensor(0.3), x.new_tensor(0.3, dtype=torch.float32)]
    likes += [torch.tensor(0.3, dtype=x.dtype), like]
    exact = [torch.tensor(np.float64(0.3)), wide]
    return [ones, cast, low, *made, *likes, *exact, torch.tensor([3, 4]), torch.tensor(True), torch.as_tensor(np.full(2, 0.3, np.float32))]


def test_numbers_that_a_capture_makes_constants_of_have_the_digits_that_they_have_in_the_model() -> None:
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    wanted = [promote_tensor(each) for each in constants(x)]
    wide = x.double()
    with default_float64(), Promoting(torch.bfloat16):
        found = constants(wide)
    assert torch.get_default_dtype() is torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_numbers_have_the_digits_of_the_users_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with default_float64(), Promoting(torch.float64):
            assert torch.tensor(0.3).item() == 0.3
            with default_float64(False):
                assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_ops_that_take_a_number_keep_it_and_so_does_what_is_made_of_tensors() -> None:
    with default_float64(), Promoting():
        x, exact = torch.ones(1), torch.full((1,), 0.3)
        filled = [exact, torch.scalar_tensor(0.3)[None], x.new_full((1,), 0.3), torch.ones(1).fill_(0.3), x.masked_fill(x > 0, 0.3)]
        of_tensors = [torch.as_tensor(exact, dtype=torch.float32), torch.asarray(exact), x.new(exact)]
        written = torch.ones(2)
        written[0], written[1] = exact[0], np.float64(0.3)
    assert [each.item() for each in (*filled, *of_tensors, *written)] == [0.3] * 10


def test_a_number_too_large_for_the_dtype_of_the_model_is_written_as_it_is() -> None:
    with default_float64(), Promoting(torch.float16):
        x = torch.ones(1, 2) * 2
        x[[0], [0]] = -1e9
    assert x.tolist() == [[-1e9, 2]]


class Overwriting(nn.Module):
    """Writes into what a cast gives, which in the model is a copy."""

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.cast = nn.Linear(6, 6), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        copy = self.cast(h)
        copy.mul_(10)
        return h.square().sum() + copy.float().sum()


@pytest.mark.parametrize(
    "cast",
    [
        pytest.param(lambda h: h.bfloat16(), id="bfloat16()"),
        pytest.param(lambda h: h.to(torch.bfloat16, False, False), id="to(dtype) by position"),
        pytest.param(lambda h: h.to("cpu", torch.bfloat16), id="to(device, dtype)"),
        pytest.param(lambda h: h.to(torch.ones(1, dtype=torch.bfloat16)), id="to(other)"),
        pytest.param(lambda h: h.type_as(h.bfloat16()), id="type_as"),
    ],
)
def test_what_a_cast_gives_is_a_copy_promoted_too(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, batch = Overwriting(cast), {"x": torch.randn(4, 6)}
    parallel = autopar.compile(model, virtual_mesh(tp=2), example_inputs=batch, backend="eager")
    report = parallel.verify(**batch, promote=True)
    assert report, report


def test_the_default_dtype_is_restored_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), default_float64():
        assert torch.get_default_dtype() is torch.float64
        raise ZeroDivisionError
    assert torch.get_default_dtype() is torch.float32


def test_a_copied_model_keeps_ties_and_flags_and_leaves_the_original_alone() -> None:
    model = Casting()
    model.first.bias.requires_grad_(False)
    model.last.weight = model.first.weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy_model(model, {id(value): promote_tensor(value) for value in (*model.parameters(), *model.buffers())}, promoted=True)
    assert copied.last.weight is copied.first.weight and copied.first.weight is not model.first.weight
    assert not copied.first.bias.requires_grad and copied.first.weight.requires_grad
    assert copied.shift.dtype is copied.scale.dtype is copied.first.weight.dtype is torch.float64
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_promoted_schedule_has_the_same_instructions(forms: dict[Form, Program]) -> None:
    program = scheduled(forms[Form.LOCAL])
    (schedule,), (promoted,) = program.places, promote_schedule(program).places
    assert promoted.instructions == schedule.instructions
    assert not {dtype for _, dtype in (each.type for each in promoted.buffers.values() if each.type)} & set(LOWER)
    for name, fragment in promoted.fragments.items():
        values = [node.meta["val"] for node in fragment.module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert not {value.dtype for value in values} & set(LOWER), name
    assert promoted.fingerprint != schedule.fingerprint


def test_dtypes() -> None:
    assert [promoted_dtype(dtype) for dtype in (torch.float16, torch.complex64, torch.int32, torch.bool)] == [
        torch.float64,
        torch.complex128,
        torch.int32,
        torch.bool,
    ]
