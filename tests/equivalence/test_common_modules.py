"""What people build of torch's own modules and utilities: exact on a mesh, and split."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import PlanError

WIDTH, LENGTH = 16, 3


class Squared(nn.Module):
    """The mean square of what `compute` makes of the module's parts and x."""

    def __init__(self, compute: Callable[[Squared, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.compute, self.parts = compute, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x).square().mean()


def blocks() -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(3))


def checkpointed(use_reentrant: bool) -> Squared:
    def compute(module: Squared, x: Tensor) -> Tensor:
        first, *others = module.parts["blocks"]  # type: ignore[misc]
        x = first(x)  # Where nothing needs a gradient, torch's reentrant checkpoint gives none.
        for block in others:
            x = x + checkpoint(block, x, use_reentrant=use_reentrant)  # type: ignore[operator]
        return x

    return Squared(compute, blocks=blocks())


def in_frequencies(module: Squared, x: Tensor) -> Tensor:
    """Pairs of a Linear's outputs, seen as complex factors of frequencies."""
    factors = torch.view_as_complex(module.parts["linear"](x).unflatten(-1, (WIDTH // 2 + 1, 2)))
    return torch.fft.irfft(torch.fft.rfft(x) * factors, n=WIDTH)


def conjugates(module: Squared, x: Tensor) -> Tensor:
    """Marks on views of memory, resolved or read through: torch lays `hfft` out as two of them."""
    h = module.parts["linear"](x)
    z = torch.view_as_complex(h.unflatten(-1, (WIDTH // 2, 2)))
    product = torch.einsum("bij,bkj->bik", z, z.conj()).mH.imag.sum(-1, keepdim=True)
    parts = torch.view_as_real(z.conj().resolve_conj()).sin().flatten(-2)
    return torch.fft.hfft(z, n=WIDTH) + torch.cat((z.conj().imag.exp(), torch.fft.ihfft(h).imag[..., : WIDTH // 2]), -1) + product + parts


def routed(module: Squared, x: Tensor) -> Tensor:
    """One-hot of the best of four, whose classes torch asserts."""
    scores = module.parts["router"](x)
    chosen = F.one_hot(scores.argmax(-1), 4).to(x.dtype)
    return module.parts["linear"](x) * (chosen * scores.softmax(-1)).sum(-1, keepdim=True)


MODELS: dict[str, Callable[[], Squared]] = {
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "LSTM": lambda: Squared(lambda m, x: m.parts["lstm"](x)[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "two-way GRU": lambda: Squared(lambda m, x: m.parts["gru"](x)[0], gru=nn.GRU(WIDTH, 8, 2, batch_first=True, bidirectional=True)),
    "encoder layer": lambda: Squared(
        lambda m, x: m.parts["layer"](x), layer=nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
    ),
    "complex": lambda: Squared(in_frequencies, linear=nn.Linear(WIDTH, WIDTH + 2)),
    "conjugates": lambda: Squared(conjugates, linear=nn.Linear(WIDTH, WIDTH)),
    "one-hot": lambda: Squared(routed, router=nn.Linear(WIDTH, 4), linear=nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: Squared(
        lambda m, x: m.parts["linear"](x), linear=torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
}
X = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", list(MODELS))
def test_exact_and_split(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=(X,), backend="eager")
    for module in (parallel, reference):
        module(X).backward()
    for (key, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=key)
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-12, atol=1e-12)
    # The power iteration of spectral norm runs on whole weights.
    assert parallel.summary()["flops_split"] >= (0.8 if name == "spectral norm" else 0.98), parallel.explain()


@pytest.mark.parametrize("trains", [True, False])
def test_a_recurrent_layer_in_float32_is_split(trains: bool) -> None:
    """Of which torch makes one op of oneDNN on a CPU, where nobody asks for the gradient of what it reads."""
    model, x = MODELS["LSTM"](), X.float()
    with torch.set_grad_enabled(trains):
        parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
        assert parallel.verify(x)
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()


def test_a_recurrent_network_that_drops_between_its_layers_is_split() -> None:
    """In float32, as those above; in evaluation it drops nothing."""
    model, x = Squared(lambda m, x: m.parts["lstm"](x)[0], lstm=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)), X.float()
    for each in (model, model.eval()):
        parallel = autopar.compile(each, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
        assert parallel.verify(x)
        assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()


class RunningMean(nn.Module):
    """The running mean is read in front of the first layer and written behind it; so far apart, no stage may begin between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(torch.tanh(self.first(x - self.mean)))
        with torch.no_grad():
            self.mean.mul_(0.5).add_(h.mean((0, 1)), alpha=0.5)
        return self.last(torch.relu(h)).square().mean()


def test_a_pipeline_hands_buffers_from_microbatch_to_microbatch() -> None:
    torch.manual_seed(0)
    model = RunningMean().double()
    reference = copy.deepcopy(model)
    options = {"backend": "eager", "num_microbatches": 2, "microbatch_statistics": "own"}
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=(X,), **options)
    for _ in range(2):
        parallel.zero_grad()
        reference.zero_grad()
        parallel(X).backward()
        for part in X.chunk(2):
            (reference(part) / 2).backward()
        torch.testing.assert_close(model.mean, reference.mean, rtol=1e-12, atol=1e-12)
        for (key, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=key)


class Stepped(nn.Module):
    """A counter of steps is written in front of the first layer, and read behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(1))
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.steps.add_(1.0)
        return (self.last(torch.tanh(self.middle(h))) + self.steps).square().mean()


def test_a_pipeline_reads_a_buffer_late_that_it_wrote_early() -> None:
    torch.manual_seed(0)
    model = Stepped().double()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2), example_inputs=(X,), backend="eager", num_microbatches=1)
    torch.testing.assert_close(parallel(X), reference(X), rtol=1e-12, atol=1e-12)
    assert torch.equal(model.steps, reference.steps)


def test_what_needs_all_samples_at_once_says_so() -> None:
    bag = nn.EmbeddingBag(10, WIDTH, mode="max", padding_idx=0).double()
    model = Squared(lambda m, x: m.parts["linear"](m.parts["bag"]((x[..., 0].abs() * 4).long())), bag=bag, linear=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(PlanError, match=r"(?s)test_common_modules\.py:\d+.* needs all samples of the batch at once.*num_microbatches=1"):
        autopar.compile(model.double(), autopar.virtual_mesh(pp=2), example_inputs=(X,), backend="eager", num_microbatches=2)


def transformed(module: Squared, x: Tensor) -> Tensor:
    """A spatial transformer: each sample lies on a grid of its own."""
    matrices = module.parts["linear"](x).mean(1)[:, :6].view(-1, 2, 3)
    return F.grid_sample(x[:, None], F.affine_grid(matrices, [len(x), 1, 4, 5], align_corners=False), align_corners=False)


def ids_of(x: Tensor) -> Tensor:
    return (x[..., 0].abs() * 4).long().clamp(max=9)


# Of each sample by itself, whatever torch makes of it: memory that is not filled, a size that counts samples, gradients in another layout.
SAMPLE_BY_SAMPLE: dict[str, Callable[[], Squared]] = {
    "circular padding": lambda: Squared(
        lambda m, x: m.parts["conv"](m.parts["linear"](x)),
        linear=nn.Linear(WIDTH, WIDTH),
        conv=nn.Conv1d(LENGTH, 4, 3, padding=2, padding_mode="circular"),
    ),
    "spatial transformer": lambda: Squared(transformed, linear=nn.Linear(WIDTH, WIDTH)),
    "sparse gradients of a table": lambda: Squared(
        lambda m, x: m.parts["linear"](m.parts["table"](ids_of(x))), table=nn.Embedding(10, WIDTH, sparse=True), linear=nn.Linear(WIDTH, 8)
    ),
    "sparse gradients of what is gathered": lambda: Squared(
        lambda m, x: torch.gather(
            m.parts["linear"].get_parameter("weight"), 0, ids_of(x).flatten()[:, None].expand(-1, WIDTH), sparse_grad=True
        ),
        linear=nn.Linear(WIDTH, WIDTH, bias=False),
    ),
    "sparse gradients of bags": lambda: Squared(
        lambda m, x: m.parts["linear"](m.parts["bag"](ids_of(x))), bag=nn.EmbeddingBag(10, WIDTH, sparse=True), linear=nn.Linear(WIDTH, 8)
    ),
    "fixed statistics": lambda: Squared(
        lambda m, x: m.parts["norm"](m.parts["linear"](x)).relu(), linear=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(LENGTH).eval()
    ),
}


@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}, {"tp": 2}])
@pytest.mark.parametrize("name", list(SAMPLE_BY_SAMPLE))
def test_exact_in_microbatches_of_even_and_uneven_batches(name: str, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = SAMPLE_BY_SAMPLE[name]().double()
    parallel = autopar.compile(model, autopar.virtual_mesh(**axes), example_inputs=(X,), backend="eager", num_microbatches=2)
    reference = copy.deepcopy(model)
    for x in (X, X[:3]):
        for module in (parallel, reference):
            module.zero_grad()
            module(x).backward()
        for (key, ours), theirs in zip(parallel.named_parameters(), reference.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad.to_dense(), rtol=1e-9, atol=1e-12, msg=key)
        assert parallel.verify(x)
