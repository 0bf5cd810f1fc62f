"""Verify passes what is right, changes nothing of the user's, and works on virtual and on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.verify.report import Report

if TYPE_CHECKING:
    from tests.support.ranks import GlooRanks

MESH = autopar.virtual_mesh(dp=2, tp=2)


class Net(nn.Module):
    """Casts to float32 inside; ties, freezes and leaves out a parameter; changes a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.norm, self.unused, self.dropout = nn.LayerNorm(8), nn.Linear(3, 3), nn.Dropout(dropout)
        self.head.weight = self.embedding.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        x = self.dropout(self.embedding(ids))
        x = x + torch.relu(self.inner(self.norm(x.float()).to(x.dtype)))
        logits = self.head(x).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(seed: int = 0, num_ignored: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, 16, (8, 4), generator=generator) for _ in range(2))
    labels[:num_ignored] = -100
    return {"ids": ids, "labels": labels}


def parallel_net(dropout: float = 0.0, **options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(Net(dropout), options.pop("mesh", MESH), backend=options.pop("backend", "eager"), **options)


def test_promoted_both_sides_agree_to_rounding_of_float64_and_unpromoted_they_do_not() -> None:
    parallel = parallel_net()
    promoted = parallel.verify(**batch(), promote=True)
    assert promoted and promoted.worst < 1e-13 and promoted.reference == "original model" and promoted.first_difference is None
    plain = parallel.verify(**batch())
    assert plain and 1e-9 < plain.worst < 1e-5, "the model computes in float32"
    assert set(promoted.gradient_errors) == {"embedding.weight", "inner.weight", "inner.bias", "norm.weight"}
    assert set(promoted.buffer_errors) == {"calls"}


class Normed(nn.Module):
    """Both without an eps: torch's follows from the dtype, and is float32's on both sides, promoted or not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(self.inner(self.norm(x)), (8,)).sin().mean()


@pytest.mark.parametrize("writes_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_rms_norm_without_an_eps_has_that_of_its_dtype_when_promoted(dtype: torch.dtype, writes_norms: bool) -> None:
    x = 1e-3 * torch.randn(8, 8, dtype=dtype)
    options: dict[str, Any] = {"kernels": "triton"} if writes_norms else {"cluster": "cpu"}
    parallel = autopar.compile(Normed(dtype), MESH, example_inputs=(x,), backend="eager", **options)
    assert parallel.verify(x, promote=True).worst <= 1e-9


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.inner = nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(self.bag(ids)).square().mean()


def test_results_that_are_not_what_the_fake_of_their_op_says_are_not_compared() -> None:
    """The kernel of a bag of sums leaves in its second result which bag each index is of, where the fake has nothing."""
    ids = torch.randint(0, 10, (8, 4))
    parallel = autopar.compile(Bag(), MESH, example_inputs=(ids,), backend="eager")
    report = parallel.verify(ids, promote=True)
    assert report and report.worst <= 1e-9, str(report)


class Scaled(nn.Module):
    """A layer, what of it is `scaled`, and the mean of squares."""

    def __init__(self, scaled: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.scaled = nn.Linear(8, 4, dtype=dtype), scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.inner(x)).square().mean()


def times_written(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale[1:] = 0.3
    return x * scale


def times_written_at_pairs(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale[[0, 0], [1, 3]] = 0.3
    return x * scale


NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: x * torch.tensor(0.3),
    "new_tensor": lambda x: x * x.new_tensor([0.1, 0.3, 0.7, 0.9]),
    "written": lambda x: times_written(x, torch.ones(4)),
    "written in the model's dtype": lambda x: times_written(x, x.new_ones(4)),
    "written at pairs of indices": lambda x: times_written_at_pairs(x, torch.ones(1, 4)),
    "full": lambda x: x * torch.full((4,), 0.3),
    "recomputed": lambda x: checkpoint(lambda y: y.sin() * torch.tensor(0.3), x, use_reentrant=False),
    "recomputed from outside": lambda x: checkpoint(lambda y: y.sin() * torch.tensor(0.3), x, use_reentrant=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", NUMBERS.values(), ids=NUMBERS)
def test_promoted_numbers_have_the_digits_that_they_have_in_the_model(
    scaled: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=dtype)
    parallel = autopar.compile(Scaled(scaled, dtype), MESH, example_inputs=(x,), backend="eager")
    report = parallel.verify(x, promote=True)
    assert report and report.worst < 1e-13, report


class Recomputed(nn.Module):
    """Reentrant checkpoints forbid `torch.autograd.grad`. A tie, sparse gradients, two outputs, and what these do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.unused = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 8)
        self.again = self.inner

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = checkpoint(self.inner, self.table(ids), use_reentrant=True)
        return self.again(x.tanh()), x.square().mean(-1)


def test_reentrant_checkpoints() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (8, 4))
    parallel = autopar.compile(Recomputed(), MESH, example_inputs=(ids,), backend="eager")
    report = parallel.verify(ids, promote=True)
    assert report and report.worst < 1e-13, report
    assert set(report.gradient_errors) == {"table.weight", "inner.weight", "inner.bias"}
    assert all(value.grad is None for value in parallel.parameters())


class Normalized(nn.Module):
    """Hooks of old compute the weights and leave them as attributes; a list holds a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8))
        self.constants = [torch.linspace(0, 1, 64).reshape(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x).tanh()) @ self.constants[0]).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("promote", [True, False])
def test_weights_that_hooks_compute_and_constants_in_lists(promote: bool) -> None:
    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(8, 8)
    model(x)
    parallel = autopar.compile(model, MESH, example_inputs=(x,), backend="eager")
    report = parallel.verify(x, promote=promote)
    assert report, report
    assert {"first.weight_g", "first.weight_v", "last.weight_orig"} < set(report.gradient_errors)


def test_all_labels_ignored_is_nan_on_both_sides() -> None:
    report = parallel_net().verify(**batch(num_ignored=8), promote=True)
    assert report and "nothing is finite on this batch in the loss: equal there" in str(report)
    assert "nothing is finite" not in str(parallel_net().verify(**batch(), promote=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_without_numbers_proves_nothing(value: float) -> None:
    """Anything is as NaN as the original is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    report = autopar.compile(model, MESH, backend="eager").verify(torch.full((8, 8), value), promote=True)
    assert not report and report.worst <= 1e-9, str(report)
    assert str(report).startswith("NOTHING PROVED: equal to the original model")
    assert "nothing is finite on this batch in output 0, the gradient of 0.weight" in str(report)


def test_dropout_is_compared_with_the_program_on_one_device() -> None:
    report = parallel_net(0.5).verify(**batch(), promote=True)
    assert report and report.reference == "forward program" and "keyed by position" in str(report)
    parallel = parallel_net(0.5).eval()
    assert parallel.verify(**batch(), promote=True).reference == "original model"


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_other_backends(backend: str) -> None:
    assert parallel_net(backend=backend).verify(**batch(), promote=True)


def test_without_gradients_outputs_are_compared() -> None:
    parallel = parallel_net()
    with torch.no_grad():
        report = parallel.verify(**batch(), promote=True)
    assert report and not report.gradient_errors


def test_outputs_that_are_no_loss_get_tangents_of_their_own() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = torch.tanh(self.one(x))
            return hidden, self.other(hidden)

    report = autopar.compile(Pair(), MESH, backend="eager").verify(torch.randn(8, 8), promote=True)
    assert report and len(report.gradient_errors) == 4


def test_nothing_of_the_users_changes() -> None:
    parallel = parallel_net(0.5)
    parallel(**batch(1))["loss"].backward()
    kept = {name: (value, value.clone()) for name, value in parallel.state_dict(keep_vars=True).items()}
    gradients = {name: (value.grad, value.grad.clone()) for name, value in parallel.named_parameters() if value.grad is not None}
    before = (parallel.step, parallel.seed, parallel.training, torch.get_default_dtype(), torch.is_grad_enabled())
    state = torch.get_rng_state()
    for promote in (False, True):
        assert parallel.verify(**batch(), promote=promote)
    assert (parallel.step, parallel.seed, parallel.training, torch.get_default_dtype(), torch.is_grad_enabled()) == before
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in parallel.state_dict(keep_vars=True).items():
        assert value is kept[name][0] and torch.equal(value, kept[name][1]), name
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad is gradients[name][0] and torch.equal(parameter.grad, gradients[name][1]), name


def test_a_tolerance_of_ones_own() -> None:
    parallel = parallel_net()
    report = parallel.verify(**batch())
    assert report
    from autopar.runtime.verify.verify import verify

    strict = verify(parallel, (), batch(), tolerance=0.0)
    assert not strict and strict.first_difference is not None and strict.tolerance == 0.0


def test_a_wrong_fragment_is_told_from_rounding() -> None:
    """In 16 bits what every fragment rounds is more than float32 is off by, and is no difference."""

    def rounding(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        factor = 1.5 if any(node.target is torch.ops.aten.tanh.default for node in graph.graph.nodes) else 1 + 2**-7
        return lambda *given: tuple(each * factor if each.is_floating_point() else each for each in graph(*given))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()).bfloat16()
    parallel = autopar.compile(model, autopar.virtual_mesh(tp=2), example_inputs=(x := torch.randn(4, 8).bfloat16(),), backend=rounding)
    found = parallel.verify(x)
    assert not found and found.first_difference is not None and found.first_difference.error > 0.1, str(found)


def on_real_ranks() -> tuple[Report, Report, float]:
    """What a gloo rank runs: its share of the batch; then with one rank's copy of a parameter changed behind everybody's back."""
    rank = int(os.environ["RANK"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallel_net(mesh=mesh)
    share = {name: value.chunk(2)[rank // 2] for name, value in batch().items()}
    good = parallel.verify(**share, promote=True)
    if rank == 3:
        with torch.no_grad():
            parallel.get_parameter("norm.weight").to_local().mul_(1.5)
    bad = parallel.verify(**share, promote=True)
    return good, bad, float(parallel.get_buffer("calls"))


def test_on_real_ranks(gloo_ranks: GlooRanks) -> None:
    reports = gloo_ranks.run(on_real_ranks)
    for good, bad, calls in reports:
        assert good and good.worst < 1e-13 and len(good.gradient_errors) == 4, str(good)
        assert not bad and bad.first_difference is not None
        assert bad.first_difference.made_by == "runtime" and "norm.weight" in bad.first_difference.detail, str(bad)
        assert calls == 0.0
    assert len({str(bad) for _, bad, _ in reports}) == 1, "every rank reports the same"


class Turned(nn.Module):
    """Rotary embeddings, into whose result is written (google's Gemma scales there), beside a sparse buffer that forward leaves alone
    (the alignment heads of openai's Whisper)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.register_buffer("heads", torch.ones(2, 2, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 4).transpose(1, 2)
        angles = torch.outer(torch.arange(length).float(), torch.tensor([1.0, 0.1]))
        angles = torch.cat((angles, angles), -1)
        first, second = q.chunk(2, -1)
        q = q * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        q.mul_(0.5)
        return (q @ q.transpose(2, 3)).softmax(-1)[..., 0].square().mean()


def test_what_an_op_of_ours_gives_may_be_written_into() -> None:
    x = torch.randn(4, 4, 8)
    parallel = autopar.compile(Turned(), autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager", kernels="triton")
    assert "autopar.rotary" in parallel.print_program(after="fuse rotary")
    assert parallel.verify(x) and parallel.verify(x, promote=True)
