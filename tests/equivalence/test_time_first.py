"""Inputs of [length, batch], as nn.Transformer has them by default: dim 0 is taken for the batch, which is said where it does not do, and
with `batch_dims=` all is split and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import MicrobatchError, rank_plans
from autopar.doors.measure_work import measure_work
from tests.support.captures import compiled

TAKEN = "dim 0 of the inputs (17) was taken for the batch; if dim 1 (8) is, as where time comes first, say so: "
SPLIT = (
    "no matmul, convolution or attention can be split over dim 0 of the inputs (17), taken for the batch: batch_dims= says if another is"
)


class Language(nn.Module):
    """Predicts the next symbol; `is_shifted`: reads all but the last one, and its labels are all but the first."""

    def __init__(self, is_shifted: bool = True) -> None:
        super().__init__()
        self.is_shifted = is_shifted
        self.table, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        read, labels = (x[:-1], x[1:]) if self.is_shifted else (x, x)
        return F.cross_entropy(self.out(self.layers(self.table(read))).flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    """One label for each sample, beside symbols of [length, batch]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(32, 16), nn.RNN(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.rnn(self.table(x))[0][-1]), y)


class Pairs(nn.Module):
    """Compares samples with each other: dim 0 is the batch, and no other dim is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(a) @ self.fc(b).T, torch.arange(len(a)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).square().mean()


def symbols(length: int = 17) -> dict[str, Tensor]:
    return {"x": torch.randint(0, 32, (length, 8))}


def to_try(text: str) -> str:
    return text.split("to try\n")[-1].split("\n\n")[0]


def refusal(model: nn.Module, mesh: dict[str, int], batch: dict[str, Tensor], **options: Any) -> str:
    with pytest.raises(MicrobatchError) as caught:
        compiled(model, mesh, batch, num_microbatches=2, **options)
    return str(caught.value)


def test_explain_says_what_was_taken_for_the_batch_and_what_to_try() -> None:
    parallel = compiled(Language(), {"dp": 2, "tp": 2}, symbols())
    text = parallel.explain()
    assert parallel.summary()["flops_split"] == 0.5 and f"dp=2  not used: {SPLIT}\n" in text and max(map(len, text.splitlines())) <= 160
    assert "batch_dims=1, if dim 1 of the inputs (8) is the batch, as where time comes first: no op mixes it" in to_try(text)


def test_a_number_of_microbatches_that_is_refused_says_what_was_taken_for_the_batch() -> None:
    text = refusal(Language(), {"pp": 2, "dp": 2}, symbols())
    assert "aten.slice.Tensor needs all samples of the batch at once" in text and "use num_microbatches=1" in text
    assert text.splitlines()[-1] == f"{TAKEN}batch_dims=1; over it microbatches change nothing"
    labels = {"x": torch.randint(0, 32, (17, 8)), "y": torch.randint(0, 4, (8,))}
    text = refusal(Classifier(), {"dp": 2}, labels)
    assert f"{TAKEN}batch_dims={{'x': 1, 'y': 0}}; over it" in text
    with_dims = compiled(Classifier(), {"dp": 2}, labels, num_microbatches=2, batch_dims={"x": 1, "y": 0})
    assert with_dims.compiled.mesh.num_microbatches == 2 and with_dims.verify(**labels)


def test_a_number_that_nobody_asked_for_and_that_gives_way_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    parallel = compiled(Language(), {"pp": 2}, symbols(16))
    assert parallel.compiled.mesh.num_microbatches == 1 and "batch_dims=1" in caplog.text and "batch_dims=1" in to_try(parallel.explain())
    assert "over it microbatches change nothing" in parallel.explain(detail="microbatches").splitlines()[-1]


def test_positions_that_are_split_and_gathered_again_are_no_samples() -> None:
    """All is split, for links are free: along the length, and attention gathers."""
    parallel = compiled(Language(is_shifted=False), {"dp": 2}, symbols(16))
    assert parallel.summary()["flops_split"] == 1.0 and "batch_dims=1" in to_try(parallel.explain())


def test_one_sample_is_named() -> None:
    text = compiled(Language(is_shifted=False), {"dp": 2}, symbols(1)).explain()
    assert "dp=2  not used: there is one sample in dim 0 of the inputs (1), taken for the batch: batch_dims= says if another is" in text


@pytest.mark.parametrize("dims", [0, {"x": 0}])
def test_who_said_it_is_not_asked_again(dims: Any) -> None:
    text = compiled(Language(), {"dp": 2}, symbols(), batch_dims=dims).explain()
    assert "dp=2  not used: no matmul, convolution or attention can be split over the batch\n" in text and "batch_dims" not in text
    assert "batch_dims" not in refusal(Language(), {"pp": 2}, symbols(16), batch_dims=dims)


def test_a_model_that_does_compare_samples_is_told_of_no_other_dim() -> None:
    batch = {"a": torch.randn(8, 16), "b": torch.randn(8, 16)}
    *lines, last = refusal(Pairs(), {"pp": 2}, batch).splitlines()
    assert "aten.mm needs all samples" in lines[1] and lines[-1].startswith("use num_microbatches=1")
    assert last == "dim 0 of the inputs (8) was taken for the batch; if another dim is, as where time comes first, say so by batch_dims="
    assert "batch_dims" not in compiled(Pairs(), {"dp": 2}, batch).explain()
    assert "batch_dims" not in refusal(Normed(), {"dp": 2}, {"x": torch.randn(8, 16)})


@pytest.mark.parametrize(
    ("mesh", "options"), [({"dp": 2, "tp": 2}, {}), ({"pp": 2, "dp": 2}, {"num_microbatches": 2})], ids=["dp2 tp2", "pp2 dp2"]
)
def test_with_batch_dims_all_is_split_and_exact(mesh: dict[str, int], options: dict[str, int]) -> None:
    batch = symbols()
    parallel = compiled(Language().double(), mesh, batch, batch_dims=1, **options)
    assert parallel.summary()["flops_split"] == 1.0 and "dp=2  splits the batch in 2 parts" in parallel.explain()
    assert parallel.compiled.mesh.num_microbatches == options.get("num_microbatches", 1)
    report = parallel.verify(**batch)
    assert report and report.worst <= 1e-12, str(report)


def test_a_flat_mesh_is_found_for_the_batch_that_was_named() -> None:
    batch = symbols(18)
    parallel = compiled(Language(), {"world": 4}, batch, batch_dims=1)
    assert parallel.compiled.mesh.ranks.size == 4 and parallel.summary()["flops_split"] == 1.0 and parallel.verify(**batch)
    works = {None: measure_work(Language(), batch, "8xH100"), 1: measure_work(Language(), batch, "8xH100", batch_dims=1)}
    assert works[None].mixes_samples and not works[1].mixes_samples
    asked: dict[str, Any] = {"cluster": "8xH100:2", "global_batch": 8, "num_microbatches": 2, "tp": (1,), "example_inputs": batch}
    assert not rank_plans({1: works[None]}, **asked).plans and rank_plans(Language(), **asked, batch_dims=1).plans
