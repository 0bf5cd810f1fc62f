"""Batches of many lengths on a few programs: what a padded call gives is what the model gives for the batch itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from tests.support.models.trained import batch, small_gpt
from tests.support.models.zoo import Case, bert, gpt2, llama
from tests.support.ranks import GlooRanks

TOKENS = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def cut(values: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    return {name: value[:, :length].contiguous() for name, value in values.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def largest_error(parallel: Any, model: nn.Module, values: dict[str, Tensor]) -> float:
    """Of the loss and of every gradient, beside the model on the batch itself."""
    loss, wanted = parallel(**values).loss, model(**values).loss
    loss.backward()
    wanted.backward()
    found, expected = gradients(parallel), gradients(model)
    assert found.keys() == expected.keys()
    errors = [float((found[name] - each).abs().max()) for name, each in expected.items()]
    return max(abs(float(loss.detach() - wanted.detach())), *errors)


@pytest.mark.parametrize("make", [gpt2, llama, bert])
def test_many_lengths_run_as_the_model_does_on_each(make: Callable[..., Case]) -> None:
    """BERT attends to what its mask shows, the others to what came before."""
    case = make(1)
    mesh, pad_to = autopar.virtual_mesh(dp=2, tp=2), autopar.PadTo((8, 16), TOKENS)
    parallel = autopar.compile(copy.deepcopy(case.model), mesh, backend="eager", pad_to=pad_to)
    for length in (16, 11, 9, 16):
        assert largest_error(parallel, case.model, cut(case.batch, length)) < 1e-6  # transformers computes the loss in float32
        assert parallel.verify(promote=True, **cut(case.batch, length))
    assert len(parallel._captures) == 1
    assert largest_error(parallel, case.model, cut(case.batch, 5)) < 1e-6
    assert len(parallel._captures) == 2


def test_outputs_are_those_of_the_batch_itself() -> None:
    case = gpt2(1)
    ids = case.batch["input_ids"]
    parallel = autopar.compile(copy.deepcopy(case.model), autopar.virtual_mesh(tp=2), backend="eager", pad_to=autopar.PadTo(16, TOKENS))
    with torch.no_grad():
        for length in (16, 11, 7):
            torch.testing.assert_close(parallel(input_ids=ids[:, :length]).logits, case.model(input_ids=ids[:, :length]).logits)
    assert len(parallel._captures) == 1


class Scores(nn.Module):
    """Its outputs have the positions in other dims, and one less."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.embed(x).tanh()
        return found.transpose(1, 2), found[:, 1:] - found[:, :-1]


def test_gradients_come_back_through_outputs_that_were_cut() -> None:
    model, x = Scores(), torch.randint(8, (4, 5))
    parallel = autopar.compile(
        copy.deepcopy(model), autopar.virtual_mesh(dp=2), backend="eager", outputs="all", pad_to=autopar.PadTo(8, {"x": 0})
    )
    for module in (parallel, model):
        one, other = module(x=x)
        assert one.shape == (4, 4, 5) and other.shape == (4, 4, 4)
        (one.square().sum() + other.exp().sum()).backward()
    torch.testing.assert_close(gradients(parallel), gradients(model))
    assert parallel.verify(promote=True, x=x)


def test_by_the_default_backend() -> None:
    model, x = Scores(), torch.randint(8, (4, 8))
    parallel = autopar.compile(copy.deepcopy(model), autopar.virtual_mesh(dp=2), outputs="all", pad_to=autopar.PadTo(8, {"x": 0}))
    for length in (6, 8, 3):
        for module in (parallel, model):
            module(x=x[:, :length])[1].exp().sum().backward()
        torch.testing.assert_close(gradients(parallel), gradients(model))
    assert len(parallel._captures) == 1


class Told(Scores):
    """With something else about its input, by `tell`."""

    def __init__(self, tell: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: Tensor) -> Any:
        return self.embed(x).square().mean(), self.tell(self.embed(x))


@pytest.mark.parametrize(
    ("tell", "wrong"),
    [
        (
            lambda x: x.unflatten(1, (-1, 2)).sum(2).detach(),
            r"shape \[4, 2, 4\] for a batch of length 4, and of shape \[4, 4, 4\] for one of 8",
        ),
        (lambda x: x.shape[1], "output 1 of the model is 4 for a batch of length 4, and 8 for one of 8"),
        (lambda x: x.detach() if x.shape[1] > 4 else None, r"is None for a batch of length 4, and of shape \[4, 8, 4\] for one of 8"),
        (lambda x: x.detach().unbind(1), "a structure of 5 values for a batch of length 4, and another, of 9, for one of 8"),
    ],
)
def test_an_output_that_cannot_be_cut_is_refused_before_anything_changes(tell: Callable[[Tensor], Any], wrong: str) -> None:
    parallel = autopar.compile(
        Told(tell),
        autopar.virtual_mesh(dp=2),
        backend="eager",
        outputs="all",
        pad_to=autopar.PadTo(8, {"x": 0}),
        optimizer=torch.optim.SGD,
    )
    parallel(x=torch.zeros(4, 8, dtype=torch.long))
    before = copy.deepcopy(parallel.state_dict())
    with pytest.raises(InputError, match=f"{wrong}.*leave out pad_to="):
        parallel.train_step(x=torch.zeros(4, 4, dtype=torch.long))
    torch.testing.assert_close(dict(parallel.state_dict()), dict(before), rtol=0, atol=0)


def test_what_one_length_told_of_outputs_is_asked_of_others() -> None:
    parallel = autopar.compile(
        Told(lambda x: x[:, : x.shape[1] // 2 * 2]),
        autopar.virtual_mesh(dp=2),
        backend="eager",
        outputs="all",
        pad_to=autopar.PadTo(8, {"x": 0}),
    )
    assert parallel(x=torch.zeros(4, 6, dtype=torch.long))[1].shape == (4, 6, 4)
    with pytest.raises(InputError, match=r"shape \[4, 4, 4\] for a batch of length 5"):
        parallel(x=torch.zeros(4, 5, dtype=torch.long))


def test_verify_tells_where_padding_is_not_kept_out() -> None:
    class Mean(Scores):
        def forward(self, x: Tensor) -> Any:
            return self.embed(x).mean(1).square().sum()

    parallel = autopar.compile(Mean(), autopar.virtual_mesh(dp=2), backend="eager", pad_to=autopar.PadTo(8, {"x": 0}))
    assert parallel.verify(x=torch.randint(8, (4, 8)))
    report = parallel.verify(x=torch.randint(8, (4, 5)))
    assert not report
    assert "the batch is padded from length 5 to 8, and the model GIVES ANOTHER" in str(report)


class Dropped(Scores):
    """With dropout, and `more` that a batch's own length changes, or not."""

    def __init__(self, more: Callable[..., Any]) -> None:
        super().__init__()
        self.drop, self.norm, self.more = nn.Dropout(0.5), nn.BatchNorm1d(4), more

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.more(self, self.drop(self.embed(x).transpose(1, 2)), labels)


def _normed(model: Dropped, scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model.norm(scores), labels)


def _penalised(model: Dropped, scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels) + (scores.square().mean() if model.training else 0.0)


def _told_in_training(model: Dropped, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(scores, labels)} if model.training else {"scores": scores}


def _noisy(model: Dropped, scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores + torch.rand_like(scores) + torch.empty_like(scores).uniform_(1, 2), labels)


@pytest.mark.parametrize(("more", "is_kept_out"), [(_normed, False), (_penalised, False), (_told_in_training, True), (_noisy, True)])
def test_verify_asks_of_a_model_that_draws_in_training(more: Callable[..., Any], is_kept_out: bool) -> None:
    parallel = autopar.compile(
        Dropped(more), autopar.virtual_mesh(dp=2), backend="eager", pad_to=autopar.PadTo(8, {"x": 0, "labels": -100})
    )
    report = parallel.verify(x=torch.randint(8, (4, 5)), labels=torch.randint(4, (4, 5)))
    assert bool(report) == is_kept_out, report


@pytest.mark.parametrize(
    ("pad_to", "wrong"),
    [
        (autopar.PadTo((4, 8), TOKENS), "the batch has length 16, and the longest that pad_to= has is 8"),
        (autopar.PadTo(8, {"ids": 0}), "pad_to= names none of this call's inputs, which are input_ids, labels"),
        (autopar.PadTo(8, {"input_ids": 0}), "'labels' has length 16 in dim 1, as the inputs have that pad_to= pads, and no value there"),
        (autopar.PadTo(24, {"input_ids": 1e30, "labels": -100}), "pads 'input_ids', of torch.int64, with 1e.30, which that cannot hold"),
        (autopar.PadTo(24, {"input_ids": 0.5, "labels": -100}), "pads 'input_ids', of torch.int64, with 0.5, .*: it would be 0"),
        (autopar.PadTo(8, TOKENS, dim=2), r"'input_ids' has shape \[8, 16\], and pad_to= pads dim 2, which it has not"),
        (autopar.PadTo(8, TOKENS, dim=0), "dim 0 of 'input_ids' counts samples"),
    ],
)
def test_what_cannot_be_padded_is_refused(pad_to: autopar.PadTo, wrong: str) -> None:
    case = gpt2(1)
    with pytest.raises(InputError, match=wrong):
        autopar.compile(case.model, autopar.virtual_mesh(dp=2), backend="eager", example_inputs=case.batch, pad_to=pad_to)


def test_inputs_of_two_lengths_are_refused() -> None:
    case = gpt2(1)
    parallel = autopar.compile(case.model, autopar.virtual_mesh(dp=2), backend="eager", pad_to=autopar.PadTo(8, TOKENS))
    with pytest.raises(InputError, match="differ in length: input_ids 16, labels 9"):
        parallel(input_ids=case.batch["input_ids"], labels=case.batch["labels"][:, :9])


def test_the_value_for_an_input_goes_before_that_for_the_argument_it_is_nested_in() -> None:
    class Nested(Scores):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.embed(batch["x"]).transpose(1, 2), batch["labels"])

    model, values = Nested(), {"x": torch.randint(8, (4, 5)), "labels": torch.randint(4, (4, 5))}
    pad_to = autopar.PadTo(8, {"batch": 0, "batch['labels']": -100})
    parallel = autopar.compile(copy.deepcopy(model), autopar.virtual_mesh(dp=2), backend="eager", pad_to=pad_to)
    torch.testing.assert_close(parallel(batch=values), model(batch=values))


@pytest.mark.parametrize("lengths", [0, (), (8, -1), 1.5, True])
def test_lengths_are_positive(lengths: Any) -> None:
    with pytest.raises(InputError, match="pass a length"):
        autopar.PadTo(lengths, TOKENS)


def of_their_own_lengths(axes: tuple[str, ...]) -> list[float]:
    """The largest errors of a few steps: each place along the first axis has batches as long as they come."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    model, pad_to = small_gpt(), autopar.PadTo(8, {"tokens": 0, "labels": -100})
    parallel = autopar.compile(copy.deepcopy(model), mesh, backend="eager", pad_to=pad_to, optimizer=torch.optim.SGD)
    place = dist.get_rank() // 2 if axes[0] == "dp" else 0
    errors: list[float] = []
    for number, lengths in enumerate([(8, 8), (5, 7), (3, 8), (6, 6)]):
        lengths = lengths if axes[0] == "dp" else lengths[:1]
        parts = [cut(each, length) for each, length in zip(_shares(batch(number), len(lengths)), lengths, strict=True)]
        found = parallel.train_step(**parts[place])
        errors.append(abs(float(found.detach()) - _mean_loss(model, parts, number)))
    whole = parallel.full_state_dict()
    return [*errors, max(float((whole[name] - each).abs().max()) for name, each in model.state_dict().items())]


def _shares(values: dict[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    return [{name: value.chunk(number)[place] for name, value in values.items()} for place in range(number)]


def _mean_loss(model: nn.Module, parts: list[dict[str, Tensor]], number: int) -> float:
    """One step of plain SGD by the mean over all tokens that count, whatever the lengths."""
    counts = [int((each["labels"] != -100).sum()) for each in parts]
    loss = sum(count * model(**each) for count, each in zip(counts, parts, strict=True)) / sum(counts)
    model.zero_grad()
    loss.backward()
    torch.optim.SGD(model.parameters()).step()
    return float(loss.detach())


@pytest.mark.parametrize("axes", [("dp", "tp"), ("pp", "tp")])
def test_ranks_train_on_batches_of_their_own_lengths(gloo_ranks: GlooRanks, axes: tuple[str, ...]) -> None:
    for errors in gloo_ranks.run(of_their_own_lengths, axes):
        assert max(errors) < 1e-9, errors


def evaluated() -> tuple[list[int], str, str]:
    """The shape of what a rank gets of a batch of its own length, what `verify` says, and what all hear of one whose batch is too long."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = gpt2(1)
    parallel = autopar.compile(case.model, mesh, backend="eager", pad_to=autopar.PadTo((8, 12), TOKENS))
    place = dist.get_rank() // 2
    mine = cut({name: value.chunk(2)[place] for name, value in case.batch.items()}, 7 if place else 10)
    with torch.no_grad():
        shape = list(parallel(input_ids=mine["input_ids"]).logits.shape)
    report = str(parallel.verify(promote=True, **mine))
    try:
        parallel(**(case.batch if place else mine))
    except InputError as error:
        return shape, report, str(error)
    return shape, report, ""


def test_ranks_get_outputs_of_their_own_lengths_and_hear_of_each_other(gloo_ranks: GlooRanks) -> None:
    for rank, (shape, report, refused) in enumerate(gloo_ranks.run(evaluated)):
        assert shape[:2] == [4, 7 if rank >= 2 else 10]
        assert report.startswith("equal") and re.search("padded from length (7|10) to 12", report)
        assert "rank 2: the batch has length 16, and the longest that pad_to= has is 12" in refused


def refused(pad_to: autopar.PadTo, lengths: tuple[int, int]) -> str:
    """What a rank hears where the batches of one half of the ranks cannot be padded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(small_gpt(), mesh, backend="eager", pad_to=pad_to, timeout=20)
    with pytest.raises(InputError) as caught:
        parallel(**cut(batch(0), lengths[dist.get_rank() // 2]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("pad_to", "lengths", "wrong"),
    [
        (autopar.PadTo((4,), {"tokens": 0, "labels": -100}), (0, 8), "rank 2: the batch has length 8"),
        (autopar.PadTo(8, {"tokens": 1e30, "labels": -100}), (5, 8), "pad_to= pads 'tokens', of torch.int64, with 1e+30"),
    ],
)
def test_no_rank_waits_for_one_that_cannot_pad(gloo_ranks: GlooRanks, pad_to: autopar.PadTo, lengths: tuple[int, int], wrong: str) -> None:
    for heard in gloo_ranks.run(refused, pad_to, lengths):
        assert wrong in heard


class MeanOverPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).square().mean()


def verified_beside_a_longer() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(MeanOverPositions(), mesh, backend="eager", pad_to=autopar.PadTo(8, {"tokens": 0}))
    length = 8 if dist.get_rank() // 2 else 3
    return str(parallel.verify(tokens=batch(0)["tokens"][:, :length]))


def test_verify_asks_of_each_rank_that_has_a_batch_of_its_own_length(gloo_ranks: GlooRanks) -> None:
    for report in gloo_ranks.run(verified_beside_a_longer):
        assert report.startswith("NOT EQUAL") and "padded from length 3 to 8, and the model GIVES ANOTHER" in report


def of_one_batch() -> str:
    """What ranks hear that are to pass the same batch, where one passes another length; after a call that was right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = autopar.compile(small_gpt(), mesh, backend="eager", pad_to=autopar.PadTo(8, {"tokens": 0, "labels": -100}), timeout=20)
    parallel(**cut(batch(0), 5))
    with pytest.raises(InputError) as caught:
        parallel(**cut(batch(0), 6 if dist.get_rank() == 3 else 5))
    return str(caught.value)


def test_ranks_of_one_batch_have_it_in_one_length(gloo_ranks: GlooRanks) -> None:
    for heard in gloo_ranks.run(of_one_batch):
        assert "ranks 2 and 3 pass batches of lengths 5 and 6" in heard
