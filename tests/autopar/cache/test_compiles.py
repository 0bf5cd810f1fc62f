"""Compiles from a cache: found by whoever asks the same of a model that does the same, and the same program."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autopar
import autopar.doors.compile
from autopar import ParallelModule, TrainStep
from autopar.cache.folder import CacheFolder
from autopar.errors import AutoparError
from autopar.ops import rule
from tests.support.models import residual, trained, vision, zoo

Options = dict[str, Any]


def compiled(model: nn.Module, batch: dict[str, Tensor], axes: dict[str, int] | None = None, **options: Any) -> ParallelModule:
    mesh = autopar.virtual_mesh(**(axes or {"dp": 2, "tp": 2}))
    return autopar.compile(model, mesh, example_inputs=batch, **{"backend": "eager"} | options)


def ids() -> dict[str, Tensor]:
    return {"ids": residual.batch()[0]}


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return residual.Residual().double()


# By name a model, a batch and what is asked; a model that has no loss to differentiate is trained by `train_step`.
CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor], Options]]] = {
    "gpt2 with dropout": lambda: (*_of(zoo.gpt2(dropout=0.1)), {}),
    "resnet": lambda: (*_of(vision.resnet()), {}),
    "bert": lambda: (*_of(zoo.bert()), {"memory_budget": "1GiB"}),
    "a pipeline": lambda: (blocks(), ids(), {"axes": {"pp": 2, "dp": 2}, "cluster": "8xa100", "num_microbatches": 2}),
    "a training step": lambda: (
        trained.small_gpt(),
        trained.batch(1),
        {"optimizer": (torch.optim.AdamW, {"lr": 0.01}), "train_step": TrainStep(clip_grad_norm=0.1)},
    ),
    "evaluation": lambda: (blocks().eval(), ids(), {}),
}


def _of(case: zoo.Case) -> tuple[nn.Module, dict[str, Tensor]]:
    return case.model, case.batch


def outcome(parallel: ParallelModule, batch: dict[str, Tensor], steps: bool) -> dict[str, str]:
    """What it runs, and the bits of what comes of it."""
    torch.manual_seed(1)
    if steps:
        losses = [parallel.train_step(**batch) for _ in range(2)]
        tensors = [*losses, *parallel.state_dict().values()]
    else:
        result = parallel(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        tensors = [loss, *(each.grad for each in parallel.parameters()), *parallel.buffers()]
    bits = b"".join(each.detach().numpy().tobytes() for each in tensors if each is not None)
    schedule = parallel.compiled.updating or parallel.compiled.schedule
    return {"bits": hashlib.sha256(bits).hexdigest(), "schedule": str(schedule), "plan": parallel.plan.fingerprint}


def run(name: str, cache: str | None) -> dict[str, str]:
    torch.manual_seed(0)
    model, batch, options = CASES[name]()
    return outcome(compiled(model, batch, cache=cache, **options), batch, steps="train_step" in options)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing is to be compiled")


def main(folder: str) -> None:
    """What another process does: it may only read."""
    autopar.doors.compile.compile_call = refuse
    print(json.dumps({name: run(name, folder) for name in CASES}))


def test_another_process_runs_the_same(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    written = {name: run(name, folder) for name in CASES}
    script = f"from tests.autopar.cache.test_compiles import main; main({folder!r})"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    answer = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == written
    assert written["gpt2 with dropout"] == run("gpt2 with dropout", None), "and so does a compile without a cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In which `blocks` on dp × tp is, alone."""
    path = tmp_path_factory.mktemp("cached") / "cache"
    compiled(blocks(), ids(), cache=path)
    assert len(list(path.iterdir())) == 1
    return str(path)


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar.doors.compile, "compile_call", refuse)


@pytest.mark.usefixtures("only_read")
def test_an_equal_model_is_found(folder: str) -> None:
    compiled(blocks(), ids(), cache=folder)


MISSES: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor], Options]]] = {
    "another mesh": lambda: (blocks(), ids(), {"axes": {"dp": 4}}),
    "another option": lambda: (blocks(), ids(), {"kernels": "off"}),
    "another batch": lambda: (blocks(), {"ids": ids()["ids"].repeat(2, 1)}, {}),
    "another dtype": lambda: (blocks().float(), ids(), {}),
    "another cluster": lambda: (blocks(), ids(), {"cluster": "8xa100"}),
    "pins": lambda: (blocks(), ids(), {"pins": {"*.up.weight": ("tp", None)}}),
    "an optimizer": lambda: (blocks(), ids(), {"optimizer": torch.optim.SGD}),
    "one more layer": lambda: (residual.Residual(3).double(), ids(), {}),
    "evaluation": lambda: (blocks().eval(), ids(), {}),
    "another backend": lambda: (blocks(), ids(), {"backend": "aot_eager"}),
}


@pytest.mark.usefixtures("only_read")
@pytest.mark.parametrize("what", MISSES)
def test_another_question_is_none(folder: str, what: str) -> None:
    model, batch, options = MISSES[what]()
    with pytest.raises(AssertionError, match="nothing is to be compiled"):
        compiled(model, batch, cache=folder, **options)


@pytest.mark.usefixtures("only_read")
def test_settings_of_torch_and_versions_are_part_of_the_question(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.enable_math_sdp(False)
    try:
        with pytest.raises(AssertionError, match="nothing is to be compiled"):
            compiled(blocks(), ids(), cache=folder)
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    monkeypatch.setattr("autopar.cache.surroundings._sources", lambda: "another version of this package")
    with pytest.raises(AssertionError, match="nothing is to be compiled"):
        compiled(blocks(), ids(), cache=folder)


@pytest.mark.usefixtures("only_read")
def test_without_gradients_is_another_question(folder: str) -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match="nothing is to be compiled"):
        compiled(blocks(), ids(), cache=folder)


@pytest.mark.parametrize("theirs", [lambda node: None, functools.partial(print)])
def test_a_rule_of_the_users_is_not_cached(
    theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(rule.RULES, "their.op", theirs)
    with caplog.at_level(logging.INFO, "autopar"):
        compiled(blocks(), ids(), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists() and "a rule or kernel of the user's" in caplog.text


def test_a_gradient_of_the_users_for_an_op_of_torchs_is_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("relu", lambda x: torch.clamp(x, min=0.0), "AutogradCUDA")
        with caplog.at_level(logging.INFO, "autopar"):
            compiled(blocks(), ids(), cache=tmp_path / "cache")
    finally:
        library._destroy()
    assert not (tmp_path / "cache").exists() and "aten/relu/AutogradCUDA" in caplog.text


def test_numbers_of_numpy_are_part_of_what_a_compile_is_known_by(tmp_path: Path) -> None:
    class OfNumpy(nn.Module):
        def __init__(self, table: numpy.ndarray, scale: numpy.float64) -> None:
            super().__init__()
            self.layer, self.table, self.scale = nn.Linear(8, 8), table, scale

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * torch.from_numpy(self.table) * self.scale).sum()

    x, found = torch.ones(4, 8), list[float]()
    for entry, scale in ((1, 1), (1, 1), (2, 1), (1, 3)):
        torch.manual_seed(0)
        model = OfNumpy(numpy.full(8, entry, "f"), numpy.float64(scale))
        parallel = compiled(model, {"x": x}, {"dp": 2}, cache=tmp_path / "cache")
        found.append(parallel(x=x).item() / model(x).item())
    assert found == pytest.approx([1] * 4) and len(list((tmp_path / "cache").iterdir())) == 3


def test_a_model_that_is_not_known_is_compiled_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = blocks()
    model.get_submodule("head").register_forward_hook(lambda module, args, output: 2 * output)
    with caplog.at_level(logging.INFO, "autopar"):
        parallel = compiled(model, ids(), cache=tmp_path / "cache")
    assert "this compile is not cached: modules with hooks" in caplog.text and not (tmp_path / "cache").exists()
    assert parallel.verify(**ids())


@pytest.mark.parametrize("broken", [b"", b"not a program"])
def test_a_broken_file_is_compiled_again(folder: str, broken: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = Path(folder).iterdir()
    copy = tmp_path / file.name
    copy.write_bytes(broken)
    tmp_path.chmod(0o700)
    wanted = outcome(compiled(blocks(), ids()), ids(), steps=False)
    assert outcome(compiled(blocks(), ids(), cache=tmp_path), ids(), steps=False) == wanted
    assert "it is compiled again" in caplog.text
    assert copy.read_bytes() == file.read_bytes() or len(copy.read_bytes()) > 1000, "and written anew"


class Unfit:
    """Cannot be read: two numbers are no three."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.zeros(2).view, (3,)


def test_whole_bytes_of_another_kind_are_compiled_again(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = Path(folder).iterdir()
    for content in (b"no pickle", pickle.dumps(("fingerprint", [1, 2])), pickle.dumps(1), pickle.dumps(Unfit())):
        CacheFolder(tmp_path).write(file.name, content)
        tmp_path.chmod(0o700)
        caplog.clear()
        compiled(blocks(), ids(), cache=tmp_path)
        assert "is not read" in caplog.text


def test_what_is_shown_is_what_runs(folder: str) -> None:
    parallel = compiled(blocks(), ids(), cache=folder)
    fresh = compiled(blocks(), ids())
    assert parallel.explain() == fresh.explain()
    assert parallel.print_program(after="choose shardings") == fresh.print_program(after="choose shardings")
    assert parallel.why("*.up.weight") == fresh.why("*.up.weight")
    assert str(parallel.memory()) == str(fresh.memory())
    assert parallel.verify(**ids()) and parallel.compiled.forms is parallel.compiled.forms


def test_forms_are_those_of_the_call_that_was_read(folder: str) -> None:
    parallel = compiled(blocks(), ids(), cache=folder)
    wanted = compiled(blocks(), ids()).print_program(after="trace joint")
    parallel.eval()
    with torch.no_grad():
        assert parallel.print_program(after="trace joint") == wanted
    assert not parallel.training


def test_forms_of_a_model_that_has_changed_are_refused(folder: str) -> None:
    model = blocks()
    parallel = compiled(model, ids(), cache=folder)
    model.repeats = 2
    with pytest.raises(AutoparError, match="read from a cache .* has changed since"):
        parallel.explain()


def test_a_model_without_values_is_found_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        models = [residual.Residual(is_tied=True) for _ in range(2)]
    compiled(models[0], ids(), cache=tmp_path / "cache")
    monkeypatch.setattr(autopar.doors.compile, "compile_call", refuse)
    compiled(models[1], ids(), cache=tmp_path / "cache")
    with pytest.raises(AssertionError, match="nothing is to be compiled"):
        compiled(residual.Residual(is_tied=True), ids(), cache=tmp_path / "cache")  # it has values, and may run


@pytest.mark.usefixtures("only_read")
def test_plans_and_schedules_are_there_without_a_compile(folder: str) -> None:
    parallel = compiled(blocks(), ids(), cache=folder)
    assert parallel.plan.parameters and "RUN" in str(parallel.compiled.schedule)


def test_a_compile_that_warns_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = autopar.doors.compile.compile_call

    def warning(*args: Any, **kwargs: Any) -> Any:
        logging.getLogger("autopar").warning("mind the gap")
        return make(*args, **kwargs)

    monkeypatch.setattr(autopar.doors.compile, "compile_call", warning)
    compiled(blocks(), ids(), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
