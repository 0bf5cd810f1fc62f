"""The first screen of explain() answers three questions: what is split, why not otherwise, what limits the step. On one screen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ParallelModule
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.kept import keep, kept_path
from autopar.errors import AutoparError
from autopar.reports.explain import sections
from autopar.reports.first_screen import MOST_LINES
from tests.support.captures import compiled
from tests.support.models import language, zoo
from tests.support.models.residual import plain_pipe

NUMBERS = re.compile(r"-?\d+(?:\.\d+)?e[-+]?\d+|\bnan\b|\binf\b|[+ ]-\d")


class Odd(nn.Module):
    """Two layers of sizes that an axis of five ranks neither divides nor nearly does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(x))).sum()


def gpt(**options: object) -> ParallelModule:
    case = zoo.gpt2(2).to(torch.float32)
    return compiled(case.model, {"dp": 2, "tp": 2}, case.batch, **options)


def assert_is_readable(text: str) -> None:
    """One screen, and no number that nobody can read."""
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= 160, text
    assert not NUMBERS.search(text), NUMBERS.findall(text)


def test_a_transformer_on_free_links() -> None:
    text = gpt().explain()
    assert_is_readable(text)
    assert "dp=2  splits the batch in 2 parts of 4 samples" in text and re.search(
        r"tp=2  splits all arithmetic \(92 % by weights, else by positions\), \d+ of \d+ parameters", text
    )
    assert re.search(r"transformer\.h\.\*\.mlp\.c_fc\.weight +\[32, 128@tp\] +columns over tp +× 2", text)
    assert "columns over tp within each 32" in text  # queries, keys and values in one matrix
    # Its product is split along the tokens: the weight only lies in parts.
    assert re.search(r"transformer\.h\.\*\.attn\.c_proj\.weight +\[32@tp, 32\] +in parts over tp", text)
    assert re.search(r"what limits it: communication, \d\d %", text)
    assert "one CPU core a rank, by cpu.yaml" in text and "all 4 ranks take turns in one process" in text
    assert "what limits it: " in text and 'cluster="8xH100"' in text


def test_a_pipeline_says_where_it_is_cut_and_how_long_stages_wait() -> None:
    text = plain_pipe().explain()
    assert_is_readable(text)
    assert "pp=2  2 stages, cut before " in text and "in the order 1f1b" in text and "8xa100" in text
    assert "2 microbatches" in text and "waiting for other stages" in text


def test_encoder_and_decoder_fit_on_one_screen() -> None:
    case = language.ZOO["t5"]().to(torch.float32)
    text = compiled(case.model, {"dp": 2, "tp": 2}, case.batch).explain()
    assert_is_readable(text)
    assert ".{q,k,v,o}.weight " in text and " others, " in text


def test_an_axis_that_splits_nothing_says_why() -> None:
    text = compiled(Odd(), {"dp": 2, "tp": 5}, {"x": torch.randn(20, 3)}).explain()
    assert_is_readable(text)
    assert "tp=5  not used: fc.weight, dim 0: 3 does not divide by tp = 5" in text
    assert "dp=10 in place of dp=2 × tp=5: all 5 ranks along tp do the same work" in text


def test_an_op_without_a_module_has_a_name_there() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).square().mean()

    text = compiled(Root(), {"dp": 2, "tp": 2}, {"x": torch.randn(8, 64)}, cluster="8xH100").explain()
    assert re.search(r"tp=2  not used: split over (it|tp), aten.\w+ would", text), text


def test_an_axis_that_costs_more_than_it_saves_says_by_how_much() -> None:
    text = gpt(cluster="8xH100").explain()
    assert_is_readable(text)
    assert re.search(
        r"tp=2  not used: split over it, \S+ would take [\d.]+ [nµm]s less, and sending what it then lacks [\d.]+ [nµm]s more", text
    )
    assert "free" not in text and "on 8xH100" in text


def test_the_first_line_says_what_ranks_repeat_of_other_ops() -> None:
    """Bags of unequal length have no rule: each rank looks them all up, which is most of the work, and no matmul."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.out = nn.EmbeddingBag(4096, 64, mode="sum"), nn.Linear(64, 8)

        def forward(self, symbols: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.out(self.bags(symbols, offsets)).square().mean()

    batch = {"symbols": torch.randint(0, 4096, (512,)), "offsets": torch.arange(64) * 8}
    text = autopar.compile(Bags(), autopar.virtual_mesh(tp=4), example_inputs=batch, backend="eager").explain()
    found = re.search(r"all matmuls.* are split, others that ranks repeat take (\d+)% of op time, most of it (.*)\n", text)
    assert found is not None and int(found[1]) > 50 and found[2] == "aten._embedding_bag in bags"


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "4"])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"world": 2}])
def test_what_is_no_number_of_microbatches_is_refused(value: Any, axes: dict[str, int]) -> None:
    with pytest.raises(AutoparError, match=r"num_microbatches=.* is no number of microbatches: pass 1 or more, or leave it out"):
        autopar.compile(nn.Linear(4, 4), autopar.virtual_mesh(**axes), num_microbatches=value)


def test_zero_a_budget_and_precision_are_said() -> None:
    case = zoo.llama(1).to(torch.float32)
    text = compiled(case.model, {"dp": 2}, case.batch, zero=3, precision="bf16").explain()
    assert_is_readable(text)
    assert "zero=3" in text and "a step in bfloat16" in text and "over dp" in text
    text = compiled(case.model, {"dp": 2}, case.batch, memory_budget="1MB").explain()
    assert "within memory_budget, 1.0 MB" in text


def test_a_tenth_more_is_more_than_was_asked_for() -> None:
    """Of which the search is left less than all: fragments take something within themselves, too."""
    case, known = zoo.gpt2(2).to(torch.float32), {"cluster": "8xH100", "optimizer": "adamw"}
    budget = int(0.7 * compiled(case.model, {"dp": 4}, case.batch, **known).memory().peak_bytes)
    text = compiled(case.model, {"dp": 4}, case.batch, memory_budget=budget, **known).explain()
    assert f"memory_budget='{1.1e-3 * budget:.1f} kB': a tenth more would save" in text


def test_details_are_there_on_request() -> None:
    parallel = gpt()
    whole = parallel.explain(detail="all")
    assert whole.startswith("dp=2 × tp=2, cluster ideal: ") and "\nparameters\n  transformer.wte.weight" in whole
    section = parallel.explain(detail="communication")
    assert section in whole and section.splitlines()[0] == "communication, bytes a rank sends in a step"
    assert parallel.explain(detail="pipeline") == "pipeline: nothing to say"
    layer = parallel.explain("transformer.h.1")
    assert "transformer.h.1.mlp.c_fc.weight" in layer and "h.0" not in layer and "wte" not in layer and "aten.mm" in layer
    with pytest.raises(AutoparError, match="detail='costs' is no section of explain.*'communication'.*'all'"):
        parallel.explain(detail="costs")
    with pytest.raises(AutoparError, match=r"'transformer.g.\*' matches nothing; parameters: transformer"):
        parallel.explain("transformer.g.*")
    guide = (Path(__file__).parents[3] / "docs" / "reading.md").read_text(encoding="utf-8")
    assert "Sections: " + ", ".join(f"`{each.name}`" for each in sections(parallel.compiled)) + "." in guide
    with pytest.raises(AutoparError, match="two questions"):
        parallel.explain("transformer.h.1", detail="all")


def test_seconds_are_said_by_the_calibration_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    cpu = Cluster.named("cpu")
    slow = replace(cpu, device=replace(cpu.device, flops=tuple((name, value / 10_000) for name, value in cpu.device.flops)))
    parallel = gpt()
    before = parallel.explain()
    keep(slow, "cpu")
    text = parallel.explain()
    assert "this machine, as autopar.calibrate() measured it" in text and "what limits it: arithmetic" in text
    assert before.split("a step in")[0] == text.split("a step in")[0]  # what is decided stays
    kept_path("cpu").write_text("name: broken")
    assert "by cpu.yaml" in parallel.explain()


def test_compiling_reads_no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured, or read what was measured")

    monkeypatch.setattr("autopar.cost.hardware.kept.kept", refuse)
    monkeypatch.setattr("autopar.cost.hardware.calibrate.calibrate", refuse)
    assert autopar.compile(Odd(), autopar.virtual_mesh(dp=2), example_inputs={"x": torch.randn(4, 3)}, backend="eager")
