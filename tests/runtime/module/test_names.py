from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import AutoparError, CaptureError
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.captures import compiled


class Model(nn.Module):
    kind = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale, self.config = nn.Linear(4, 4), 1.0, {"factor": 1.0}
        self.register_buffer("count", torch.zeros(()))

    @property
    def width(self) -> int:
        return self.fc.in_features

    def own_method(self, factor: float) -> float:
        self.scale = self.scale * factor
        return self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) * self.scale * self.config["factor"]).square().mean()


def parallel_and_model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    return compiled(model, {"dp": 2, "tp": 2}), model


def test_names_of_the_model_are_read_there() -> None:
    parallel, model = parallel_and_model()
    assert parallel.config is model.config and parallel.fc is model.fc and parallel.count is model.count
    assert parallel.scale == 1.0 and parallel.kind == "mine" and parallel.width == 4
    assert parallel.own_method(3.0) == model.scale == 3.0
    assert {"own_method", "config", "fc", "explain"} <= set(dir(parallel))
    assert not hasattr(parallel, "nothing")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nothing'"):
        _ = parallel.nothing
    for name, told in (("module", "names of its model itself"), ("no_sync", "leave it out")):
        assert not hasattr(parallel, name)
        with pytest.raises(AttributeError, match=told):
            getattr(parallel, name)


def test_what_is_set_is_the_models_and_the_next_call_has_it() -> None:
    parallel, model = parallel_and_model()
    x = torch.randn(4, 4)
    before = parallel(x).item()
    parallel.scale = 2.0
    assert model.scale == 2.0 and "scale" not in vars(parallel)
    torch.testing.assert_close(parallel(x).item(), 4 * before)
    parallel.own_method(0.5)
    parallel.config["factor"] = 3.0
    torch.testing.assert_close(parallel(x).item(), 9 * before)
    parallel.act, parallel.note = nn.Tanh(), "new"
    assert model.act is parallel.act and dict(model.named_children()).keys() == {"fc", "act"}
    del parallel.act, parallel.note
    assert not hasattr(model, "act") and not hasattr(model, "note")


def test_names_of_ours_stay_ours() -> None:
    parallel, model = parallel_and_model()
    parallel.step, parallel.seed = 5, 7
    assert (parallel.step, parallel.seed) == (5, 7) and not hasattr(model, "step")
    handle = parallel.register_forward_hook(lambda module, args, output: output * 2)
    assert not model._forward_hooks
    handle.remove()
    parallel.training = False
    assert model.training is False and model.fc.training is True


def test_a_name_of_both_is_ours_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Clashing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seed = 3

        def summary(self) -> str:
            return "the model's"

    model = Clashing()
    parallel: ParallelModule = compiled(model, {"dp": 2, "tp": 2})
    assert "names that the parallel module has, too: seed, summary; parallel.seed is autopar's" in caplog.text
    parallel.seed = 9
    assert model.seed == 3 and model.summary() == "the model's"
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        parallel_and_model()
    assert not caplog.records


class Counting(nn.Module):
    """Its buffer, parameter and layers have names that a parallel module has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.plan, self.seed = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("_world", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step.add_(1)
        return (self.plan(x) * self.seed / self.step).square().mean() * self._world


def test_parameters_and_buffers_with_names_of_ours_are_the_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Counting()
    model, x = copy.deepcopy(plain), torch.randn(4, 4)
    parallel: Any = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend="eager")
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (parallel, plain))
    for _ in range(2):
        for optimizer, called in ((mine, parallel), (theirs, plain)):
            optimizer.zero_grad()
            called(x).backward()
            optimizer.step()
    torch.testing.assert_close(parallel.state_dict(), plain.state_dict())
    parallel.step = 5
    assert (parallel.step, model.step.item()) == (5, 2.0) and parallel.verify(x)
    autopar.save(tmp_path, parallel)
    other: Any = autopar.compile(Counting(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    autopar.load(tmp_path, other)
    torch.testing.assert_close(other.state_dict(), plain.state_dict())
    assert other.step == 5


def test_what_is_loaded_or_looked_up_under_names_of_ours_is_the_models() -> None:
    model, other, x = Counting(), Counting(), torch.randn(4, 4)
    parallel: Any = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    state = {name: value + 1 for name, value in other.state_dict().items()}
    parallel.load_state_dict(state, assign=True)
    torch.testing.assert_close(model.state_dict(), state)
    assert isinstance(parallel.step, int) and parallel.seed is None
    assert parallel.get_submodule("plan") is model.plan and parallel.get_submodule("") is parallel
    assert parallel.get_parameter("plan.weight") is model.plan.weight and parallel.get_buffer("step") is model.step
    del parallel.step
    assert "step" in dict(model.named_buffers())


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.parametrize("on_parallel", [False, True])
def test_backward_hooks_of_the_whole_model_see_what_they_see_in_plain_torch(mesh: dict[str, int], on_parallel: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Model(), nn.Identity())
    model[0].fc = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    reference = copy.deepcopy(model)
    parallel = compiled(model, mesh)
    seen = dict[str, list[Any]](ours=[], theirs=[])
    x = torch.randn(8, 4)
    for name, module, called in (("ours", parallel if on_parallel else model, parallel), ("theirs", reference, reference)):
        module.register_full_backward_hook(lambda _, *gradients, to=seen[name]: to.append(gradients))
        handle = module.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 3,))
        called(x).backward()
        handle.remove()
        called(x).backward()
    torch.testing.assert_close(seen["ours"], seen["theirs"])
    assert [float(gradients[1][0]) for gradients in seen["ours"]] == [3.0, 1.0]
    for ours, theirs in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(parallel._captures) == 1


def test_backward_hooks_inside_the_model_are_refused_in_training_alone() -> None:
    parallel, model = parallel_and_model()
    x, seen = torch.randn(4, 4), list[Any]()
    before = parallel(x)
    handle = model.fc.register_full_backward_hook(lambda *gradients: seen.append(gradients))
    with pytest.raises(CaptureError, match=r"fc \(Linear\) has a backward hook, which asks for gradients inside .* hooks of parameters"):
        parallel(x)
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), before.detach())
    model(x).backward()
    assert len(seen) == 1
    handle.remove()
    parallel(x).backward()


class Predicting(Model):
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).argmax(-1)

    def fail(self) -> None:
        raise RuntimeError("of its own")


def names_on_ranks(axes: dict[str, int]) -> list[str]:
    """What methods of the model say once its parameters lie on ranks, and what a second compile of it says; the remedy is followed."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model, x = Predicting(), torch.randn(2, 4)
    wanted = model.predict(x)
    parallel = autopar.compile(model, mesh, backend="eager")
    parallel(x)
    assert parallel.own_method(2.0) == 2.0
    found: list[str] = []
    for call in (lambda: parallel.predict(x), parallel.fail, *([lambda: autopar.compile(model, mesh)] if "pp" not in axes else [])):
        with pytest.raises((RuntimeError, AutoparError)) as error:
            call()
        found.append(f"{type(error.value).__name__}: {error.value}")
    fresh = Predicting()
    fresh.load_state_dict(parallel.full_state_dict())
    assert torch.equal(fresh.predict(x), wanted)
    return found


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def weights_written(folder: str, axes: dict[str, int]) -> tuple[str, bool]:
    """What transformers' own way of writing weights says there; and whether those of the remedy are the model's."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2))
    reference, ids = copy.deepcopy(model), torch.arange(16).view(8, 2)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel = autopar.compile(model, mesh, example_inputs={"input_ids": ids, "labels": ids}, backend="eager")
    text = ""
    try:
        parallel.save_pretrained(folder)
    except AutoparError as error:  # on the ranks that write, in the eyes of transformers
        text = str(error)
    parallel.save_pretrained(folder, state_dict=parallel.full_state_dict())
    torch.distributed.barrier()
    again = LlamaForCausalLM.from_pretrained(folder)
    return text, all(map(torch.equal, again.state_dict().values(), reference.state_dict().values()))


@pytest.mark.parametrize("axes", [{"dp": 4}, {"pp": 2, "dp": 2}], ids=["dp4", "pp2 dp2"])
def test_on_processes_transformers_writes_the_weights_that_it_is_given(gloo_ranks: Any, tmp_path: Path, axes: dict[str, int]) -> None:
    texts, are_equal = zip(*gloo_ranks.run(weights_written, str(tmp_path), axes), strict=True)
    assert "save_pretrained calls the model itself" in texts[0] and "pass it state_dict=parallel.full_state_dict()" in texts[0]
    assert all(are_equal)


def snapshots(axes: dict[str, int]) -> dict[str, Any]:
    """Whole states, and what becomes of them while the parameters go on; and which ranks hear of a key that a state lacks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), Squares()).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    parallel = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", optimizer=torch.optim.Adam)
    parallel.train_step(x)
    state, trained = parallel.full_state_dict(), parallel.train_state_dict()
    before, trained_before = copy.deepcopy(state), copy.deepcopy(trained)
    parallel.train_step(x)
    after = parallel.full_state_dict()
    first = next(iter(state))
    with pytest.raises(RuntimeError) as error:
        parallel.load_state_dict({key: value for key, value in state.items() if key != first})
    return {
        "kept": all(torch.equal(state[key], before[key]) for key in before),
        "training kept": str(trained) == str(trained_before),
        "moved": not any(torch.equal(after[key], before[key]) for key in before),
        "missing": f'Missing key(s) in state_dict: "{first}"' in str(error.value),
    }


@pytest.mark.parametrize("axes", [{"pp": 4}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=["pp4", "pp2 dp2", "dp2 tp2"])
def test_whole_states_are_copies_and_every_rank_hears_of_a_missing_key(gloo_ranks: Any, axes: dict[str, int]) -> None:
    for found in gloo_ranks.run(snapshots, axes):
        assert all(found.values()), found


def own_states(axes: dict[str, int]) -> dict[str, Any]:
    """A rank's own state read back after a step; and what is said of one that lacks a key, or has whole values of this stage alone."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    x = torch.randn(8, 4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), Squares())
    parallel = autopar.compile(model, mesh, example_inputs=(x,), backend="eager", cluster="ideal", optimizer=torch.optim.Adam)
    before, state = parallel.full_state_dict(), copy.deepcopy(parallel.state_dict())
    parallel.train_step(x)
    names = parallel.load_state_dict(state)
    after, first, texts = parallel.full_state_dict(), next(iter(state)), list[str]()
    for wrong in ({key: state[key] for key in state if key != first}, {key: before[key] for key in state}):
        with pytest.raises(RuntimeError) as error:
            parallel.load_state_dict(wrong)
        texts.append(str(error.value))
    return {
        "read back": not names.missing_keys and all(torch.equal(after[key], before[key]) for key in before),
        "own key missing": f'Missing key(s) in state_dict: "{first}". ' in f"{texts[0]}. ",
        "others missing": all(f'"{key}"' in texts[1] for key in before if key not in state),
    }


@pytest.mark.parametrize("axes", [{"pp": 4}, {"pp": 2, "dp": 2}], ids=["pp4", "pp2 dp2"])
def test_a_stage_reads_its_own_state_back(gloo_ranks: Any, axes: dict[str, int]) -> None:
    for found in gloo_ranks.run(own_states, axes):
        assert all(found.values()), found


def test_on_processes_what_computes_beside_the_mesh_says_what_serves(gloo_ranks: Any) -> None:
    for method, own, compiled_twice in gloo_ranks.run(names_on_ranks, {"dp": 4}):
        assert method.startswith("AutoparError: predict calls the model itself, whose parameters lie on ranks ('fc.weight' is a DTensor)")
        assert "parallel.full_state_dict()" in method and method.endswith("and call predict of that")
        assert own == "RuntimeError: of its own"
        assert compiled_twice.startswith("ModelError: parameter 'fc.weight' of the model is a DTensor: the model, or a part of it, was")


def test_a_stage_without_a_parameter_says_so_too(gloo_ranks: Any) -> None:
    found = [method for method, _ in gloo_ranks.run(names_on_ranks, {"pp": 2, "dp": 2})]
    assert all(each.startswith("AutoparError: predict calls the model itself, whose parameters lie on ranks") for each in found)
    assert {"is on meta" in each for each in found} == {True, False}
