import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError, BackwardError, InputError, MeshError
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled
from tests.support.schedules import BATCH, WIDTH, Mlp, mlp_compiled, parallel_mlp

MESHES = [virtual_mesh(dp=1, tp=1), virtual_mesh(dp=2, tp=1), virtual_mesh(dp=1, tp=2), virtual_mesh(dp=2, tp=4)]


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(BATCH, WIDTH, generator=generator), "y": torch.randn(BATCH, WIDTH, generator=generator)}


def check_gradients(parallel: ParallelModule, reference: Mlp) -> None:
    for (name, ours), (same, theirs) in zip(parallel.named_parameters(), reference.named_parameters(), strict=True):
        assert name == same and ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_loss_and_gradients_equal_the_models(mesh: Mesh, backend: str) -> None:
    parallel, reference = parallel_mlp(mesh, backend=backend)
    loss, expected = parallel(**batch())["loss"], reference(**batch())["loss"]
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    check_gradients(parallel, reference)


def test_a_compiled_training_loop_calls_it_as_it_is() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))

    @torch.compile(backend="eager")
    def scaled_loss(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return parallel(**inputs)["loss"] * 3

    scaled_loss(batch()).backward()
    (reference(**batch())["loss"] * 3).backward()
    check_gradients(parallel, reference)


class TwoModes(nn.Module):
    """Two key-value heads, which one kind of call does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.pair, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(16, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, attend: bool = True) -> torch.Tensor:
        if attend:
            query, key = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query(x), self.pair(x)))
            key = key.repeat_interleave(2, 1)
            x = x + self.out(F.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2).flatten(2))
        return self.down(F.gelu(self.up(x))).square().mean()


def two_kinds_of_calls(mesh: Any) -> str:
    """The meshes of both kinds, whose losses and gradients are the model's; a model that attends at first has tp = 2 × 2."""
    torch.manual_seed(0)
    model, x = TwoModes().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, mesh, example_inputs={"x": x, "attend": False}, backend="eager", cluster="ideal")
    assert str(parallel.compiled.mesh) == "tp=4"
    for attend in (True, False):
        loss, expected = parallel(x=x, attend=attend), reference(x=x, attend=attend)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    for name, parameter in reference.named_parameters():
        found = parallel.get_parameter(name).grad
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, parameter.grad)
    return ", ".join(str(each.compiled.mesh) for each in parallel._captures.values())


def two_kinds_on_ranks() -> str:
    return two_kinds_of_calls(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


def test_a_second_kind_of_call_is_on_the_mesh_of_the_first(gloo_ranks: Any) -> None:
    assert two_kinds_of_calls(virtual_mesh(tp=4)) == "tp=4, tp=4"
    assert gloo_ranks.run(two_kinds_on_ranks) == 4 * ["tp=4, tp=4"]


def test_training_follows_the_model_step_by_step() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (parallel, reference)]
    for step in range(5):
        losses = []
        for module, optimizer in zip((parallel, reference), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(**batch(step))["loss"])
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
    assert parallel.step == 0  # nothing is drawn


def test_gradients_accumulate_and_forwards_may_precede_backwards() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    for module in (parallel, reference):
        first, second = module(**batch(1))["loss"], module(**batch(2))["loss"]
        second.backward()
        (first * 0.5).backward()
        module(**batch(3))["loss"].backward()
    check_gradients(parallel, reference)


def test_autograd_grad_and_hooks_see_gradients() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    seen: list[str] = []
    for name, parameter in parallel.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    ours = torch.autograd.grad(parallel(**batch())["loss"], list(parallel.parameters()))
    theirs = torch.autograd.grad(reference(**batch())["loss"], list(reference.parameters()))
    torch.testing.assert_close(ours, theirs)
    parallel(**batch())["loss"].backward()
    assert sorted(seen) == ["fc.weight", "proj.weight"]


def test_parameters_changed_between_forward_and_backward_are_refused() -> None:
    parallel, _ = parallel_mlp(virtual_mesh(tp=2, dp=1))
    loss = parallel(**batch())["loss"]
    with torch.no_grad():
        next(parallel.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("retained", [True, False])
def test_a_second_backward_through_one_call_is_refused(retained: bool) -> None:
    parallel, _ = parallel_mlp(virtual_mesh(tp=2, dp=1))
    loss = parallel(**batch())["loss"]
    loss.backward(retain_graph=retained)
    with pytest.raises(BackwardError, match="second time .*add up the losses of one call"):
        loss.backward()


def test_gradients_that_are_to_be_differentiated_are_refused() -> None:
    """A gradient penalty would be a constant, in silence."""
    parallel, _ = parallel_mlp(virtual_mesh(tp=2, dp=1))
    with pytest.raises(BackwardError, match="create_graph=True.*would be a constant"):
        torch.autograd.grad(parallel(**batch())["loss"], list(parallel.parameters()), create_graph=True)
    assert issubclass(BackwardError, RuntimeError)


def test_a_parameter_written_behind_autograds_back_is_not_stale() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(tp=2, dp=1))
    parallel(**batch())
    for module in (parallel, reference):
        module.get_parameter("fc.weight").data.mul_(2)
    torch.testing.assert_close(parallel(**batch())["loss"], reference(**batch())["loss"])


def test_other_outputs_raise_when_touched_and_name_the_option() -> None:
    parallel, _ = parallel_mlp(virtual_mesh(dp=2, tp=2))
    out = parallel(**batch())["out"]
    touches: list[Callable[[], Any]] = [
        lambda: out.shape,
        lambda: out + 1,
        lambda: out[0],
        lambda: torch.relu(out),
        lambda: float(out),
        lambda: list(out),
    ]
    for touch in touches:
        with pytest.raises(AutoparError, match='outputs="all"'):
            touch()
    assert "not computed" in repr(out)


def test_names_submodules_and_state_are_the_models() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in reference.named_parameters()]
    assert list(parallel.state_dict()) == list(reference.state_dict()) == list(parallel.full_state_dict())
    changed = {name: value + 1 for name, value in reference.state_dict().items()}
    parallel.load_state_dict(changed)
    reference.load_state_dict(parallel.state_dict())
    torch.testing.assert_close(parallel(**batch())["loss"], reference(**batch())["loss"])
    parallel.zero_grad()
    assert parallel.eval().training is False and parallel._model.fc.training is False and parallel._model.training is False


def test_seed_and_step_travel_with_the_state(tmp_path: Any) -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    torch.manual_seed(7)
    parallel(**batch())
    parallel.step = 3
    torch.save(parallel.state_dict(), tmp_path / "state.pt")
    other, _ = parallel_mlp(virtual_mesh(dp=2, tp=2))
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (other.seed, other.step) == (7, 3)
    reference.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_clip_grad_norm() -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    parallel(**batch())["loss"].backward()
    reference(**batch())["loss"].backward()
    ours, theirs = parallel.clip_grad_norm_(0.01), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(ours, theirs)
    check_gradients(parallel, reference)


def test_a_program_is_reused_and_recapturing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    parallel, reference = parallel_mlp(virtual_mesh(dp=2, tp=2))
    captures = parallel.captures_seen
    with caplog.at_level(logging.INFO, logger="autopar"):
        parallel(**batch())
        parallel(**dict(reversed(batch().items())))
        assert len(captures) == 1 and not caplog.records
        with torch.no_grad():
            loss = parallel(**batch())["loss"]
    assert len(captures) == 2 and captures[0][2] is None and set(captures[1][2]) == {"fc.weight", "proj.weight"}
    assert "recapturing" in caplog.text and f"x [{BATCH}, {WIDTH}] float32" in caplog.text and "grad=False" in caplog.text
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference(**batch())["loss"].detach())


def test_more_than_eight_captures_warn() -> None:
    parallel, _ = parallel_mlp(virtual_mesh(dp=1, tp=2))

    def other_shapes(count: int) -> dict[str, torch.Tensor]:
        return {name: value.double() if index < count else value for index, (name, value) in enumerate(batch().items())}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(1, 9):
            parallel.prepare((), {"x": torch.ones(rows, WIDTH), "y": torch.ones(rows, WIDTH)})
    with pytest.warns(UserWarning, match="9 captures of one model"):
        parallel.prepare((), other_shapes(1))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"x": torch.ones(0, WIDTH), "y": torch.ones(0, WIDTH)}, "'x' has no samples"),
        (
            {"x": torch.ones(4, WIDTH, device="meta"), "y": torch.ones(4, WIDTH)},
            "on meta or fake, without values: 'x'; .* pass real tensors",
        ),
        ({"x": torch.ones(4, WIDTH, requires_grad=True), "y": torch.ones(4, WIDTH)}, "'x' requires grad"),
    ],
)
def test_inputs_that_cannot_run_are_refused(inputs: dict[str, torch.Tensor], expected: str) -> None:
    parallel, _ = parallel_mlp(virtual_mesh(dp=2, tp=2))
    with pytest.raises(InputError, match=expected):
        parallel(**inputs)


@pytest.mark.parametrize("name", ["step", "seed", "mesh", "plan", "compiled"])
def test_what_a_model_has_under_a_name_of_ours_stays_the_models(name: str) -> None:
    with_buffer, with_layer, with_parameter = Mlp(), Mlp(), Mlp()
    with_buffer.register_buffer(name, torch.ones(1))
    with_layer.add_module(name, torch.nn.Linear(2, 2))
    with_parameter.register_parameter(name, torch.nn.Parameter(torch.ones(1)))
    for model in (with_buffer, with_layer, with_parameter):
        held = getattr(model, name)
        parallel = ParallelModule(model, virtual_mesh(dp=1, tp=2), capture=lambda *_, **__: mlp_compiled(virtual_mesh(dp=1, tp=2)))
        assert getattr(model, name) is held and vars(parallel).get(name) is not held
        assert parallel.state_dict().keys() == model.state_dict().keys()


def test_a_parameter_that_the_first_program_does_not_use_stays_whole_in_later_ones() -> None:
    mesh, seen = virtual_mesh(dp=2, tp=2), list[Any]()
    model = Mlp()
    model.spare = torch.nn.Parameter(torch.ones(4, 3))

    def capture(args: tuple[Any, ...], kwargs: dict[str, Any], *, pins: Any, shares: Any) -> Any:
        seen.append(pins)
        return mlp_compiled(mesh, torch.is_grad_enabled())

    parallel = ParallelModule(model, mesh, capture=capture, backend="eager")
    parallel(**batch())
    with torch.no_grad():
        parallel(**batch())
    assert seen[0] is None and seen[1]["spare"].sharding.is_replicated and seen[1]["spare"].dims == ((4,), (3,))
    assert not seen[1]["fc.weight"].sharding.is_replicated


def test_questions_are_of_what_was_captured() -> None:
    parallel, _ = parallel_mlp(virtual_mesh(dp=2, tp=2))
    for ask in (lambda: parallel.why("fc"), lambda: parallel.what_if({})):
        with pytest.raises(MeshError, match="nothing is captured yet"):
            ask()
    parallel.prepare((), batch())
    with pytest.raises(AutoparError, match="not made by autopar.compile: there is nothing to decide again"):
        parallel.what_if({})


class WithSpectrum(nn.Module):
    """Returns complex values beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(x)
        return hidden, torch.complex(hidden, hidden.sin())


def test_gradients_come_back_through_complex_outputs() -> None:
    model, x = WithSpectrum(), torch.randn(4, 8)
    parallel = compiled(copy.deepcopy(model), {"dp": 2}, (x,), outputs="all")
    for each in (parallel, model):
        each(x)[1].abs().square().mean().backward()
    assert parallel.linear.weight.grad is not None
    torch.testing.assert_close(parallel.linear.weight.grad, model.linear.weight.grad)
