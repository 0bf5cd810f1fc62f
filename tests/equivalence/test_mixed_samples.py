"""Losses and layers that mix the samples of a batch: exact with the default number of microbatches, and never anything else unasked."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import ParallelModule
from autopar.errors import AutoparError, MicrobatchError
from tests.support.captures import compiled

WIDTH, SAMPLES = 8, 16
DEFAULT = 8  # two stages, four microbatches for each
Loss = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Three layers, enough for two stages; what becomes of their output is `loss(module, output, labels)`."""

    def __init__(self, loss: Loss, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, WIDTH)
        self.norm = norm or nn.Identity()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("count", torch.zeros(WIDTH))
        self.register_buffer("rate", torch.arange(1.0, WIDTH + 1))
        self.count: Tensor
        self.rate: Tensor
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return self.loss(self, self.last(torch.tanh(self.middle(h))), y)


def switch(module: Net, h: Tensor, y: Tensor) -> Tensor:
    """The balance loss of Switch Transformers (arXiv:2101.03961, equation 4): shares of tokens times mean probabilities."""
    probabilities = h.softmax(-1)
    shares = F.one_hot(probabilities.argmax(-1), WIDTH).to(h.dtype).mean(0)
    return F.cross_entropy(h, y) + 0.01 * WIDTH * (shares * probabilities.mean(0)).sum()


def contrastive(module: Net, h: Tensor, y: Tensor) -> Tensor:
    """InfoNCE: the other samples of the batch are the negatives."""
    z = F.normalize(h, dim=-1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(h)))


def weighted_by_the_network(module: Net, h: Tensor, y: Tensor) -> Tensor:
    weights = h[:, 0].detach().sigmoid()
    return (F.cross_entropy(h, y, reduction="none") * weights).sum() / weights.sum()


def one_hot(y: Tensor, h: Tensor) -> Tensor:
    return F.one_hot(y, WIDTH).to(h.dtype)


MIXING: dict[str, Loss] = {
    "product of means": lambda m, h, y: h.mean() * h.square().mean(),
    "ratio of means": lambda m, h, y: h.square().mean() / h.abs().mean(),
    "root of a mean": lambda m, h, y: F.mse_loss(h, one_hot(y, h)).sqrt(),
    "perplexity": lambda m, h, y: F.cross_entropy(h, y).exp(),
    "maximum": lambda m, h, y: h.max(),
    "maximum of each": lambda m, h, y: h.amax(0).sum(),
    "deviation": lambda m, h, y: (h - h.mean(0)).abs().mean(),
    "standard deviation": lambda m, h, y: h.std(0).mean(),
    "logsumexp": lambda m, h, y: h.logsumexp(0).mean(),
    "softmax over samples": lambda m, h, y: (h.softmax(0) * one_hot(y, h)).sum(),
    "covariance": lambda m, h, y: (h.t() @ h / len(h) - torch.eye(WIDTH)).square().sum(),
    "hardest samples": lambda m, h, y: F.cross_entropy(h, y, reduction="none").topk(4).values.mean(),
    "next sample": lambda m, h, y: (h * h.roll(1, 0)).mean(),
    "clamped mean": lambda m, h, y: h.mean().clamp(min=0.0),
    "weighted by the network": weighted_by_the_network,
    "switch": switch,
    "contrastive": contrastive,
}


def counted(module: Net, h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        module.count += (h > 0).to(module.count.dtype).sum(0)
    return h.square().mean()


def by_tokens(module: Net, h: Tensor, y: Tensor) -> Tensor:
    weights = (y > 3).to(h.dtype)
    return (F.cross_entropy(h, y, reduction="none") * weights).sum() / weights.sum()


SEPARABLE: dict[str, Loss] = {
    "mean": lambda m, h, y: h.square().mean(),
    "sum": lambda m, h, y: h.square().sum(),
    "ignored labels": lambda m, h, y: F.cross_entropy(h, y, ignore_index=3),
    "weights of classes": lambda m, h, y: F.cross_entropy(h, y, weight=torch.arange(1.0, 9.0, dtype=h.dtype)),
    "weighted by tokens": by_tokens,
    "several terms": lambda m, h, y: F.cross_entropy(h, y) + 0.5 * h.square().mean() + h.abs().sum(),
    "penalty on weights": lambda m, h, y: F.cross_entropy(h, y) + 0.1 * sum(p.square().sum() for p in m.parameters()),
    "learned scale": lambda m, h, y: (F.cross_entropy(h, y) + m.first.weight.norm()) * m.scale.exp() + m.scale,
    "stacked terms": lambda m, h, y: torch.stack([F.cross_entropy(h, y), m.first.weight.square().mean()]).mean(),
    "one less": lambda m, h, y: 1.0 - h.mean(),
    "deviation within a sample": lambda m, h, y: h.std(-1).mean(),
    "counts in a buffer": counted,
}
# One of each kind of reason.
OFTEN = {
    "ratio of means", "root of a mean", "maximum of each", "standard deviation", "softmax over samples", "hardest samples", "next sample",
    "weighted by the network", "contrastive",
    "ignored labels", "weighted by tokens", "several terms", "learned scale", "stacked terms", "counts in a buffer",
}  # fmt: skip
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=DRAW)
Y = torch.randint(0, WIDTH, (SAMPLES,), generator=DRAW)
Y[3:9] = 3


def compiled_net(loss: Loss, norm: nn.Module | None = None, mesh: dict[str, int] | None = None, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    model = Net(loss, norm).double()
    return compiled(model, mesh or {"pp": 2}, (X, Y), **options)


def number_of(parallel: ParallelModule) -> int:
    return parallel.compiled.local.mesh.num_microbatches


def assert_exact(parallel: ParallelModule) -> None:
    report = parallel.verify(X, Y, promote=True)
    assert report and report.worst <= 1e-9 and report.own_statistics_error is None, str(report)
    assert report.reference == "original model"


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in MIXING])
def test_what_mixes_samples_runs_in_one_microbatch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel = compiled_net(MIXING[name])
    assert number_of(parallel) == 1 and len(parallel.compiled.schedules) == 2
    assert_exact(parallel)
    assert "1 microbatch instead of 8" in caplog.text and "test_mixed_samples.py:" in caplog.text
    lines = parallel.explain(detail="all").splitlines()
    at = lines.index("microbatches")
    assert lines[at + 1] == "  1 instead of 8, which would change what the model computes:" and "test_mixed_samples.py:" in lines[at + 2]


@pytest.mark.parametrize(
    "name",
    [
        "maximum",
        "switch",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("product of means", "standard deviation", "contrastive")),
    ],
)
def test_what_mixes_samples_is_exact_over_dp(name: str) -> None:
    parallel = compiled_net(MIXING[name], mesh={"dp": 2})
    assert_exact(parallel)
    assert parallel.summary()["flops_split"] >= 0.98


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SEPARABLE])
def test_what_is_a_sum_over_samples_keeps_its_microbatches(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel = compiled_net(SEPARABLE[name])
    assert number_of(parallel) == DEFAULT and not caplog.text
    assert_exact(parallel)
    assert "\nmicrobatches\n" not in parallel.explain(detail="all")


def test_a_batch_norm_in_training_runs_in_one_microbatch_and_in_evaluation_in_many() -> None:
    parallel = compiled_net(SEPARABLE["mean"], nn.BatchNorm1d(16))
    assert number_of(parallel) == 1
    assert_exact(parallel)
    assert "in norm" in parallel.explain(detail="all")
    parallel.eval()
    parallel(X, Y)
    assert number_of(parallel) == DEFAULT
    assert_exact(parallel)


def refusal(loss: Loss, number: int, **options: Any) -> str:
    with pytest.raises(MicrobatchError) as caught:
        compiled_net(loss, num_microbatches=number, **options)
    return str(caught.value)


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_number_that_changes_the_meaning_is_refused_with_the_place_and_both_ways_out(mesh: dict[str, int]) -> None:
    found = refusal(MIXING["root of a mean"], 4, mesh=mesh)
    assert "num_microbatches=4 would change what the model computes" in found
    assert "test_mixed_samples.py:" in found and "aten.sqrt needs a sum over the batch" in found
    assert "use num_microbatches=1" in found and 'microbatch_statistics="own"' in found
    found = refusal(SEPARABLE["mean"], 4, mesh=mesh, norm=nn.BatchNorm1d(16))
    assert "in norm" in found and "use num_microbatches=1" in found and 'microbatch_statistics="own"' in found


def test_what_needs_all_samples_has_no_estimate_to_accept() -> None:
    found = refusal(MIXING["contrastive"], 4)
    assert "needs all samples of the batch at once" in found and "use num_microbatches=1" in found and "own" not in found
    assert "own" not in refusal(MIXING["contrastive"], 4, microbatch_statistics="own")
    parallel = compiled_net(MIXING["contrastive"], nn.BatchNorm1d(16), microbatch_statistics="own")
    assert number_of(parallel) == 1, "nobody asked for more"
    assert_exact(parallel)


def test_a_buffer_that_each_microbatch_would_change_anew_is_a_reason() -> None:
    def averages(module: Net, h: Tensor, y: Tensor) -> Tensor:
        module.count.mul_(0.9).add_(h.detach().sum(0))
        return h.square().mean()

    parallel = compiled_net(averages)
    assert number_of(parallel) == 1
    assert_exact(parallel)
    assert "the buffer 'count' is changed anew by every microbatch" in refusal(averages, 2)


def test_a_count_of_steps_is_none() -> None:
    def steps(module: Net, h: Tensor, y: Tensor) -> Tensor:
        module.count += 1
        return h.square().mean()

    parallel = compiled_net(steps)
    assert number_of(parallel) == 8
    assert_exact(parallel)


@pytest.mark.parametrize("as_it_changed", [False, True])
def test_another_buffer_that_is_added_to_one_is_added_once(as_it_changed: bool) -> None:
    """Each microbatch would add all of it: the sum over the samples is its own part, a rate is not. One that stays the first adds."""

    def drifts(module: Net, h: Tensor, y: Tensor) -> Tensor:
        if as_it_changed:
            module.rate += h.detach().sum(0)
        module.count += module.rate
        return h.square().mean()

    parallel = compiled_net(drifts)
    assert number_of(parallel) == (1 if as_it_changed else 8)
    assert_exact(parallel)
    if as_it_changed:
        assert "the buffer 'count' is changed anew by every microbatch" in refusal(drifts, 2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_sum_of_the_inputs_is_added_to_a_buffer_that_ranks_split(number: int) -> None:
    """With tp each rank adds its slice of what all microbatches have alike."""

    class Counting(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.count += x.sum(0)
            return super().forward(x, y)

    torch.manual_seed(0)
    model = Counting(SEPARABLE["mean"]).double()
    mesh = autopar.virtual_mesh(pp=2, tp=2)
    parallel = compiled(model, mesh, (X, Y), num_microbatches=number)
    assert number_of(parallel) == number
    assert_exact(parallel)


def test_the_largest_exact_number_is_taken() -> None:
    """Samples are compared in groups of eight, which must stay together: of 32 there are four."""

    def groups(module: Net, h: Tensor, y: Tensor) -> Tensor:
        return h.view(4, 8, WIDTH).mean(1).square().sum()

    torch.manual_seed(0)
    batch = (torch.cat([X, X]), torch.cat([Y, Y]))
    parallel = compiled(Net(groups).double(), {"pp": 2}, batch)
    assert number_of(parallel) == 4
    report = parallel.verify(*batch, promote=True)
    assert report and report.worst <= 1e-9, str(report)
    with pytest.raises(MicrobatchError, match="use num_microbatches=4"):
        options = {"backend": "eager", "num_microbatches": 8}
        autopar.compile(Net(groups).double(), autopar.virtual_mesh(pp=2), example_inputs=batch, **options)


def test_what_turns_out_to_mix_after_the_search_runs_in_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it be seen late, the default still gives way, and a number that was asked for is still refused."""
    monkeypatch.setattr("autopar.passes.global_.choose_microbatches.mixing", lambda program, number: ())
    parallel = compiled_net(MIXING["root of a mean"])
    assert number_of(parallel) == 1 and "1 instead of 8, which would change what the model computes" in parallel.explain(detail="all")
    assert_exact(parallel)
    assert "test_mixed_samples.py:" in refusal(MIXING["root of a mean"], 4)


# ---- each microbatch its own


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
def test_own_statistics_are_those_of_each_microbatch_and_verify_says_so(mesh: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel = compiled_net(MIXING["root of a mean"], mesh=mesh, num_microbatches=4, microbatch_statistics="own")
    assert number_of(parallel) == 4 and "each of the 4 microbatches takes its own" in caplog.text
    assert "each of the 4 takes its own in place of the whole batch's" in parallel.explain(detail="all")
    shares = [share.chunk(4) for share in X.chunk(mesh.get("dp", 1))], [share.chunk(4) for share in Y.chunk(mesh.get("dp", 1))]
    model = parallel._model
    losses = [model(torch.cat([each[j] for each in shares[0]]), torch.cat([each[j] for each in shares[1]])) for j in range(4)]
    torch.testing.assert_close(parallel(X, Y), torch.stack(losses).mean(), rtol=1e-9, atol=0)
    report = parallel.verify(X, Y, promote=True)
    assert not report and report.loss_error > 1e-6 and report.first_difference is None
    assert report.own_statistics_error is not None and report.own_statistics_error <= 1e-9
    assert "NOT EQUAL to the original model" in str(report) and 'microbatch_statistics="own" accepts' in str(report)


@pytest.mark.parametrize("mesh", [{"pp": 1}, {"dp": 2}], ids=str)
def test_what_a_microbatch_reads_of_its_buffers_is_what_the_one_before_left(mesh: dict[str, int]) -> None:
    """The run hands them on, and so does the program that `verify` compares it with."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            u = self.linear(x)
            self.mean.add_(u.detach().mean(0))
            return (u - self.mean).square().mean()

    torch.manual_seed(0)
    model = Running().double()
    alone, shares = copy.deepcopy(model), [share.chunk(4) for share in X.chunk(mesh.get("dp", 1))]
    parallel = compiled(model, mesh, (X,), num_microbatches=4, microbatch_statistics="own")
    report = parallel.verify(X, promote=True)
    assert not report and report.own_statistics_error is not None and report.own_statistics_error <= 1e-9, str(report)
    losses = [alone(torch.cat([each[number] for each in shares])) for number in range(4)]
    torch.testing.assert_close(parallel(X), torch.stack(losses).mean(), rtol=1e-9, atol=0)
    torch.testing.assert_close(dict(parallel.named_buffers())["mean"], alone.mean, rtol=1e-9, atol=0)


def test_a_run_that_is_not_its_own_statistics_either_is_told() -> None:
    parallel = compiled_net(MIXING["root of a mean"], num_microbatches=4, microbatch_statistics="own")
    assert parallel.compiled.separated is not None
    (root,) = [node for node in parallel.compiled.separated.graph.nodes if node.target is torch.ops.aten.sqrt.default]
    root.target = torch.ops.aten.exp.default
    report = parallel.verify(X, Y, promote=True)
    assert not report and report.own_statistics_error is not None and report.own_statistics_error > 1e-6
    assert report.first_difference is not None


def test_own_statistics_change_nothing_where_nothing_mixes() -> None:
    parallel = compiled_net(SEPARABLE["penalty on weights"], microbatch_statistics="own")
    assert number_of(parallel) == DEFAULT
    assert_exact(parallel)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(AutoparError, match="microbatch_statistics='mine' is unknown"):
        compiled_net(SEPARABLE["mean"], microbatch_statistics="mine")


# ---- plans


def test_a_plan_holds_the_number_and_is_no_way_around_it() -> None:
    first = compiled_net(MIXING["root of a mean"])
    assert first.plan.schedule is not None and first.plan.schedule.num_microbatches == 1
    again = compiled_net(MIXING["root of a mean"], plan=first.plan)
    assert number_of(again) == 1
    assert_exact(again)
    accepted = compiled_net(MIXING["root of a mean"], num_microbatches=4, microbatch_statistics="own").plan
    assert accepted.schedule is not None and accepted.schedule.num_microbatches == 4
    unaccepted = compiled_net(MIXING["root of a mean"], plan=accepted)
    assert number_of(unaccepted) == 1, "what one compile accepts, another does not"
    assert_exact(unaccepted)
    assert number_of(compiled_net(MIXING["root of a mean"], plan=accepted, microbatch_statistics="own")) == 4


def test_the_norm_of_a_weight_mixes_no_samples() -> None:
    """torch's backward of it is one op of the gradient, which is a sum over samples; in ops with rules microbatches know it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.weight_norm
            self.first, self.second = norm(nn.Linear(8, 16)), norm(nn.Linear(16, 8), dim=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu()).square().mean()

    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8)}
    for axes in ({"dp": 2, "tp": 2}, {"pp": 2}):
        parallel = autopar.compile(Normed(), autopar.virtual_mesh(**axes), example_inputs=batch, backend="eager", num_microbatches=2)
        report = parallel.verify(**batch)
        assert report and parallel.summary()["flops_split"] == 1, report
