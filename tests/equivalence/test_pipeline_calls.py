"""Calls of a pipeline: what may be asked of them, what is refused, and with which words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import BackwardError, CaptureError, PlanError, ScheduleError, virtual_mesh
from autopar.ir.actions import parse_schedule
from autopar.pipeline.schedules import generate
from tests.support.models.language import mixtral
from tests.support.models.pipelined import assert_split, in_stages, parameters_of, tagger
from tests.support.models.zoo import IGNORED, Batch, Case

PP2, PP2_DP2 = {"pp": 2}, {"pp": 2, "dp": 2}


def assert_as_plain(parallel: autopar.ParallelModule, reference: nn.Module, batch: Batch, scale: float = 1.0) -> None:
    """Loss, and the gradients of `scale` times the loss, to a rounding."""
    for module in (parallel, reference):
        module.zero_grad()
    loss, wanted = parallel(**batch)["loss"], reference(**batch)["loss"]
    (scale * loss).backward()
    (scale * wanted).backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-12, atol=0)
    for (name, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14, msg=name)


# ---- what is asked of a call


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_the_mean_is_over_the_labels_of_all_microbatches(schedule: str) -> None:
    """Of four microbatches of both shares, one has no label, one has one, one has half of them."""
    case = tagger(size=16)
    labels = case.batch["labels"].view(2, 4, 2, 4)
    labels[:, 1] = IGNORED
    labels[0, 2, 1:], labels[0, 2, 0, 1:], labels[1, 2] = IGNORED, IGNORED, IGNORED
    labels[1, 3, 1] = IGNORED
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2_DP2, 4, schedule)
    assert_as_plain(parallel, reference, case.batch)
    assert_split(parallel, {"symbols.weight"})


def test_a_tied_embedding_is_held_by_both_stages_and_has_one_gradient() -> None:
    case = tagger()
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, {"pp": 2, "tp": 2}, 4)
    first, last = parameters_of(parallel)
    assert first & last == {"symbols.weight"} and first - last and last - first
    assert_as_plain(parallel, reference, case.batch)
    assert parallel.verify(promote=True, **case.batch).worst <= 1e-12


def test_what_is_dropped_is_a_function_of_the_position() -> None:
    """The same draws with stages and microbatches as without, anew at every step."""
    losses = []
    for mesh, number in (({"dp": 2}, 1), (PP2, 4), ({"dp": 2}, 2)):
        case = tagger(dropout=0.5)
        torch.manual_seed(3)
        parallel = in_stages(case, mesh, number)
        report = parallel.verify(promote=True, **case.batch)
        assert report and report.worst <= 1e-9 and report.reference == "forward program"
        losses.append([float(parallel(**case.batch)["loss"].detach()) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12) and losses[2] == pytest.approx(losses[0], rel=1e-12)
    assert losses[0][0] != losses[0][1]


class Penalised(nn.Module):
    """A loss that is a sum over the samples, a penalty on the weights that is not, and a mean over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        penalty = sum(layer.weight.square().sum() for layer in self.layers)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean() + 0.1 * penalty}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_penalty_on_weights_of_all_stages_counts_once(schedule: str) -> None:
    torch.manual_seed(0)
    case = Case(Penalised().double(), {"x": torch.randn(8, 6).double()})
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2_DP2, 4, schedule)
    assert_as_plain(parallel, reference, case.batch)
    assert parallel.verify(promote=True, **case.batch)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"dp": 1}], ids=str)
def test_microbatches_need_no_stages(mesh: dict[str, int]) -> None:
    case = tagger()
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, mesh, 4)
    assert_as_plain(parallel, reference, case.batch)
    (schedule,) = parallel.compiled.schedules
    assert len(schedule.fed["batch", "0"]) == 4, "ids of four microbatches"


def test_outputs_of_all_microbatches_come_back_in_the_order_of_the_batch() -> None:
    case = tagger()
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2_DP2, 2, outputs="all")
    with torch.no_grad():
        found, wanted = parallel(**case.batch), reference(**case.batch)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        only = parallel(ids=case.batch["ids"])
    assert list(only) == ["logits"]
    torch.testing.assert_close(only["logits"], wanted["logits"], rtol=1e-12, atol=1e-14)
    trained = parallel(**case.batch)
    torch.testing.assert_close(trained["logits"], wanted["logits"], rtol=1e-12, atol=1e-14)
    report = parallel.verify(promote=True, **case.batch)
    assert report and "gradients are those of the loss alone: a pipeline refuses a backward through 1 other output" in str(report)


@pytest.mark.parametrize(("mesh", "number"), [(PP2, 1), ({"dp": 2}, 2)], ids=str)
def test_a_backward_through_another_output_than_the_loss_is_refused(mesh: dict[str, int], number: int) -> None:
    """Its gradient would be lost: what it alone trains would stay as it is, in silence."""
    case = tagger()
    parallel = in_stages(case, mesh, number, outputs="all")
    output = parallel(**case.batch)
    with pytest.raises(BackwardError, match=r"came back through output\['logits'\], but with pp > 1 .* return the sum as its loss"):
        (output["loss"] + output["logits"].square().mean()).backward()
    output = parallel(**case.batch)
    (output["loss"] + output["logits"].detach().square().mean()).backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())


class HiddenStates(nn.Module):
    """Gives beside its loss the input, the state after each layer, and two weights, as `output_hidden_states` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        states = [x]
        for layer in self.layers:
            states.append(torch.tanh(layer(states[-1])))
        return {"loss": states[-1].square().mean(), "states": states, "weights": [self.layers[0].weight, self.layers[3].weight]}


@pytest.mark.parametrize(("schedule", "number"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 4)])
def test_what_the_next_stage_reads_may_be_an_output(schedule: str, number: int) -> None:
    """It has come there already, and is not received a second time; an input of the call is with every rank."""
    torch.manual_seed(0)
    case = Case(HiddenStates().double(), {"x": torch.randn(8, 4).double()})
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2, number, schedule, outputs="all")
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            torch.testing.assert_close(parallel(**case.batch), reference(**case.batch), rtol=1e-12, atol=1e-14)
    assert_as_plain(parallel, reference, case.batch)
    assert parallel.verify(promote=True, **case.batch)


class LogitsAndLoss(nn.Module):
    """`return logits, loss`, and None in the place of the loss without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(torch.tanh(self.table(ids)))
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_loss_at_the_second_place_of_a_tuple_is_the_loss(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = LogitsAndLoss().double()
    reference, batch = copy.deepcopy(model), {"ids": torch.randint(12, (8, 4)), "targets": torch.randint(12, (8, 4))}
    parallel = autopar.compile(model, virtual_mesh(**mesh), example_inputs=batch, backend="eager", num_microbatches=2)
    logits, loss = parallel(**batch)
    _, wanted = reference(**batch)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-12, atol=0)
    for ours, theirs in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    with pytest.raises(autopar.AutoparError, match='compile with outputs="all"'):
        logits.mean()
    with torch.no_grad():
        for found, expected in zip(parallel(**batch), reference(**batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Statistics(LogitsAndLoss):
    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor | None]:
        logits, loss = super().forward(ids, targets)
        return {"loss": loss, "logits": logits, "largest": logits.amax((0, 1))}


def test_without_gradients_microbatches_give_what_has_a_batch_dim() -> None:
    torch.manual_seed(0)
    model = Statistics().double()
    reference, batch = copy.deepcopy(model), {"ids": torch.randint(12, (8, 4)), "targets": torch.randint(12, (8, 4))}
    parallel = autopar.compile(model, virtual_mesh(pp=2), backend="eager", num_microbatches=2)
    with torch.no_grad():
        found, expected = parallel(**batch), reference(**batch)
    for name in ("loss", "logits"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)
    assert "not computed" in repr(found["largest"])


def test_a_scaled_loss_scales_the_gradients() -> None:
    case = tagger()
    reference = copy.deepcopy(case.model)
    assert_as_plain(in_stages(case, PP2_DP2, 2), reference, case.batch, scale=3.0)


def test_training_follows_plain_torch() -> None:
    """Two calls a step, clipping that bites, a batch of another size in the middle."""
    case = tagger(size=12)
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2_DP2, 2, "zb-h1")
    modules = (parallel, reference)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in modules]
    smaller = {name: value[:8].flip(1) for name, value in case.batch.items()}
    for _ in range(2):
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            for batch in (case.batch, smaller):
                module(**batch)["loss"].backward()
        norms = [parallel.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)]
        assert norms[1] > 0.1
        torch.testing.assert_close(*norms, rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(parallel.full_state_dict(), reference.state_dict(), rtol=1e-10, atol=1e-12)


def test_a_pipeline_chooses_its_microbatches_itself() -> None:
    """The largest divisor of a share of 12 up to four a stage."""
    case = tagger(size=24)
    parallel = in_stages(case, PP2_DP2, None)
    assert parallel.compiled.local.mesh.num_microbatches == 6
    assert parallel.verify(promote=True, **case.batch)


# ---- schedules


def test_a_schedule_edited_by_hand_is_what_runs() -> None:
    text = str(generate("1f1b", 2, 4))
    edited = text.replace("0F0 0F1", "0F0 0F1 0F2").replace("0B0 -   0F2 0B1", "0B0 -   0B1").replace("pipeline 1f1b", "pipeline mine")
    case = tagger()
    reference = copy.deepcopy(case.model)
    parallel = in_stages(case, PP2, 4, parse_schedule(edited))
    plain = in_stages(tagger(), PP2, 4)
    assert str(parallel.compiled.schedules[0]) != str(plain.compiled.schedules[0])
    lines = str(parallel.compiled.schedules[0]).splitlines()
    sends = [line.split()[1] for line in lines if line.startswith(("SEND", "RECV")) and ">" in line]
    assert sends.index("0F2>1") < next(i for i, name in enumerate(sends) if name.startswith("1B1"))
    assert_as_plain(parallel, reference, case.batch)


def refusal(kind: type[Exception], mesh: dict[str, int], number: int | None, schedule: Any = "1f1b", case: Case | None = None) -> str:
    with pytest.raises(kind) as caught:
        in_stages(case or tagger(), mesh, number, schedule)
    return str(caught.value)


def test_a_schedule_that_cannot_run_is_refused_with_its_faults() -> None:
    text = str(generate("1f1b", 2, 4))
    swapped = parse_schedule(text.replace("1F0 1B0", "1B0 1F0"))
    assert "1B0" in refusal(ScheduleError, PP2, 4, swapped)
    missing = parse_schedule(text.replace("1B3", "."))
    assert "1B3" in refusal(ScheduleError, PP2, 4, missing)


def test_a_schedule_for_other_numbers_is_refused() -> None:
    found = refusal(ScheduleError, PP2, 4, generate("1f1b", 2, 8))
    assert "'1f1b' is for 2 ranks and 8 microbatches; this call runs on pp = 2 with 4: pass num_microbatches=8" in found
    found = refusal(ScheduleError, PP2, 4, generate("1f1b", 4, 4))
    assert "is for 4 ranks and 4 microbatches; this call runs on pp = 2" in found


def test_an_unknown_schedule_is_refused() -> None:
    assert "no schedule is called 'zigzag': there are auto, gpipe, 1f1b" in refusal(ScheduleError, PP2, 4, "zigzag")


# ---- models


class Outside(nn.Module):
    """No loss: the caller computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(("mesh", "number"), [(PP2, 2), ({"dp": 2}, 2)])
def test_a_model_without_a_loss_is_refused(mesh: dict[str, int], number: int) -> None:
    case = Case(Outside(), {"x": torch.randn(8, 4)})
    found = refusal(CaptureError, mesh, number, case=case)
    assert "a loss to start from, and this model returns none" in found and "use pp = 1 and num_microbatches=1" in found
    with torch.no_grad():
        parallel = autopar.compile(case.model, virtual_mesh(**mesh), backend="eager", num_microbatches=number)
        torch.testing.assert_close(parallel(**case.batch), case.model(**case.batch))


def test_an_op_that_needs_the_whole_batch_is_refused_with_its_line() -> None:
    found = refusal(PlanError, {"dp": 2}, 2, case=mixtral())
    assert "needs all samples of the batch at once" in found and "use num_microbatches=1" in found
    assert "modeling_mixtral.py:" in found or "moe.py:" in found, found


class Scale(nn.Module):
    """Two ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def test_more_stages_than_work_are_refused() -> None:
    found = refusal(PlanError, {"pp": 4}, 2, "interleaved", Case(Scale(), {"x": torch.ones(8)}))
    assert "8 stages" in found or "8 pipeline stages" in found, found
