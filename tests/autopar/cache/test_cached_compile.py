"""`autopar.compile(cache=…)`: a compile that reads is the compile that captured, on virtual ranks and on processes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError
from autopar.frontend.capture import capture
from autopar.ir.printing import print_program
from autopar.passes.global_.trace_joint import TraceJoint, trace_joint
from tests.support.captures import compiled, keep_captures

# A process of its own: prints whether the capture was read, and what came of the compile.
PROCESS = """
import sys, torch, transformers, autopar, hashlib
kinds = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64)),
}
tokens = torch.zeros(4, 8, dtype=torch.int64)
for name, make in kinds.items():
    parallel = autopar.compile(make(), autopar.virtual_mesh(dp=2), example_inputs={"input_ids": tokens, "labels": tokens}, backend="eager", cache=sys.argv[1])
    program = parallel.print_program(after="capture") + parallel.print_program(after="trace joint") + "".join(map(str, parallel.compiled.schedules))
    assert ("was read from " + sys.argv[1] in str(parallel.explain())) == bool(parallel.compiled.read_from)
    print(name, bool(parallel.compiled.read_from), hashlib.sha256(program.encode()).hexdigest(), hashlib.sha256(parallel.plan.to_json().encode()).hexdigest())
"""  # noqa: E501


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.second(torch.relu(self.first(x))) * self.scale
        return {"loss": self.drop(y).square().mean(), "y": y}


@pytest.fixture
def passes_as_users_have_them() -> Any:
    """Tests share joint traces by another way, which `keep_captures` puts in the pass's place."""
    yield from _unpatched()


def _unpatched() -> Any:
    def apply(chosen: TraceJoint, program: Any) -> Any:
        return trace_joint(program, True) if chosen.cache is None else chosen.cache.traced(program, (), lambda: trace_joint(program, True))

    autopar.captured.capture, TraceJoint.apply = capture, apply  # type: ignore[attr-defined, method-assign]
    yield
    keep_captures()


@pytest.mark.usefixtures("passes_as_users_have_them")
def test_a_compile_that_reads_is_the_one_that_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, batch = Block(), {"x": torch.randn(8, 8)}
    found: list[Compiled] = []
    for mesh in ({"dp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}):
        parallel = compiled(model, mesh, batch, cache=tmp_path)
        assert parallel.verify(**batch)
        found.append(parallel.compiled)
    assert [bool(each.read_from) for each in found] == [False, True, True]
    assert found[0].fingerprint == found[1].fingerprint and found[0].plan == found[1].plan
    assert print_program(found[0].local) == print_program(found[1].local)
    assert all(str(tmp_path) in each.read_from for each in found[1:])
    assert len(list(tmp_path.iterdir())) == 2, "one capture, and one joint trace, for any mesh"


@pytest.mark.slow
def test_models_of_transformers_in_another_process(tmp_path: Path) -> None:
    def lines() -> list[list[str]]:
        command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(tmp_path)]
        return [line.split() for line in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()]

    first, second = lines(), lines()
    assert [each[1] for each in first] == ["False"] * 3 and [each[1] for each in second] == ["True"] * 3
    assert [each[2:] for each in first] == [each[2:] for each in second]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="cache=3 is neither True nor a folder"):
        compiled(Block(), {"dp": 2}, {"x": torch.randn(8, 8)}, cache=3)
    (tmp_path / "file").write_text("")
    compiled(Block(), {"dp": 2}, {"x": torch.randn(8, 8)}, cache=tmp_path / "file")  # nothing is kept, and nothing fails


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def compile_on_ranks(folder: str, differs: bool) -> tuple[bool, str, list[str]]:
    unpatched, heard = _unpatched(), Heard()
    next(unpatched)
    logging.getLogger("autopar").addHandler(heard)
    torch.manual_seed(0)
    model = Block()
    if differs and dist.get_rank() == 1:
        model.note = "of this rank alone"  # type: ignore[assignment]
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallel = autopar.compile(model, mesh, example_inputs={"x": torch.randn(4, 8)}, backend="eager", cache=folder)
        loss = parallel(x=torch.ones(4, 8))["loss"]
        loss.backward()
        return bool(parallel.compiled.read_from), f"{loss.item()} {parallel.compiled.fingerprint}", heard.texts
    finally:
        logging.getLogger("autopar").removeHandler(heard)
        next(unpatched, None)


def test_rank_0_reads_for_all(tmp_path: Path, gloo_ranks: Any) -> None:
    """A rank whose model differs captures for itself: here the program is the same all the same."""
    first, second, third = (gloo_ranks.run(compile_on_ranks, str(tmp_path), differs) for differs in (False, False, True))
    assert [each[0] for each in first] == [False] * 4 and [each[0] for each in second] == [True] * 4
    assert [each[0] for each in third] == [True, False, True, True]
    assert len({each[1] for ranks in (first, second, third) for each in ranks}) == 1
    assert any("this rank's model or surroundings differ" in text for text in third[1][2])
    assert len(list(tmp_path.iterdir())) == 2, "rank 0 alone writes"
