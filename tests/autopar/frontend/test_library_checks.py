"""Functions of torch that look at values are captured, compute what they did, and assert what they ask."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError, CaptureError
from autopar.frontend import value_checks
from autopar.frontend.capture import capture
from autopar.frontend.library_checks import library_checks_asserted
from autopar.ir.program import Program
from tests.support.models.layer import MESH, Layer, X, assert_as_model, of
from tests.support.programs import inputs_of, run_forward

aten = torch.ops.aten


def positive(layer: Layer, x: Tensor) -> Tensor:
    return F.softplus(layer.linear(x))


def spread(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    return y.mT @ y + torch.eye(4)


def divergence(layer: Layer, x: Tensor) -> Tensor:
    first, second = (distributions.Laplace(mean, 1.0) for mean in (layer.linear(x), x))
    return distributions.kl_divergence(first, second).mean()


# Each with how many things it asserts.
COMPUTED: dict[str, tuple[Callable[[Layer, Tensor], Tensor], int]] = {
    "normal": (lambda layer, x: distributions.Normal(layer.linear(x), positive(layer, x)).log_prob(x).mean(), 3),
    "categorical": (lambda layer, x: distributions.Categorical(logits=layer.linear(x)).log_prob(x.argmax(1)).mean(), 2),
    "bernoulli": (lambda layer, x: distributions.Bernoulli(logits=layer.linear(x)).log_prob((x > 0).float()).mean(), 2),
    "beta": (lambda layer, x: distributions.Beta(positive(layer, x), 2.0).log_prob(x.sigmoid()).mean(), 5),
    "independent": (lambda layer, x: distributions.Independent(distributions.Normal(layer.linear(x), 1.0), 1).log_prob(x).mean(), 3),
    "divergence": (divergence, 4),
    "multivariate": (lambda layer, x: distributions.MultivariateNormal(x, spread(layer, x)).log_prob(layer.linear(x)).mean(), 4),
    "gaussian loss": (lambda layer, x: F.gaussian_nll_loss(layer.linear(x), x, positive(layer, x), full=True), 1),
    "one variance a row": (lambda layer, x: F.gaussian_nll_loss(layer.linear(x), x, positive(layer, x)[:, 0], reduction="sum"), 1),
    "covariance": (lambda layer, x: torch.cov(layer.linear(x).T, correction=0).square().sum(), 0),
    "correlation": (lambda layer, x: torch.corrcoef(layer.linear(x).T)[0].sum(), 0),
    "counts": (lambda layer, x: (torch.bincount(x.argmax(1), minlength=4) * layer.linear(x)).sum(), 1),
    "weighted counts": (lambda layer, x: (torch.bincount(x.argmax(1), x[:, 0], minlength=4) * layer.linear(x)).sum(), 1),
    "cholesky": (lambda layer, x: torch.linalg.cholesky(spread(layer, x)).sum(), 1),
    "inverse": (lambda layer, x: torch.inverse(spread(layer, x)).sum(), 1),
    "solve": (lambda layer, x: torch.linalg.solve(spread(layer, x), x.T).sum(), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_what_asks_of_values_is_captured_and_asserted(name: str) -> None:
    compute, number = COMPUTED[name]
    torch.manual_seed(0)
    program = of(compute, X)
    assert [item.kind for item in program.signature.outputs] == ["loss", *["check"] * number]
    assert len(program.signature.checks) == number and all(f"{__file__}:" in text for text in program.signature.checks)
    layer = Layer(compute)
    assert_as_model(layer, (X,), {})


def test_distributions_are_checked_after_a_torch_compile_too() -> None:
    """The first one in a process turns `validate_args` off for all distributions."""
    default = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(False)
    try:
        assert len(of(COMPUTED["normal"][0], X).signature.checks) == 3
        assert not distributions.Distribution._validate_args
        unchecked = of(lambda layer, x: distributions.Normal(layer.linear(x), x, validate_args=False).log_prob(x).mean(), X)
        assert not unchecked.signature.checks
    finally:
        distributions.Distribution.set_default_validate_args(default)


HAS_OLD_NAME = hasattr(aten, "cholesky")  # torch 2.15 has it no more


class WithoutOldName:
    def __getattr__(self, name: str) -> Any:
        if name == "cholesky":
            raise AttributeError(name)
        return getattr(aten, name)


def test_ops_that_later_torch_lacks_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "aten", WithoutOldName())
    runpy.run_path(value_checks.__file__)


def violations(program: Program, layer: nn.Module, x: Tensor) -> list[float]:
    found = run_forward(program, inputs_of(program, layer, (x,), {}))
    return [value.item() for (kind, _), value in found.items() if kind == "check"]


@pytest.mark.parametrize(
    ("compute", "x", "expected"),
    [
        (lambda layer, x: F.gaussian_nll_loss(layer.linear(x), x, x), torch.tensor([[1.0, -1, 0, -2]]), [2]),
        (lambda layer, x: layer.linear(x).sum() * torch.bincount(x[0].long(), minlength=4).max(), torch.tensor([[0.0, 3, 4, 9]]), [2]),
        (lambda layer, x: distributions.Normal(layer.linear(x), x).rsample().sum(), torch.tensor([[1.0, 0, 1, -1]]), [0, 2]),
        (lambda layer, x: torch.linalg.cholesky(x) * layer.linear.weight, -torch.eye(4), [1]),
        *[(lambda layer, x: torch.cholesky(x, True) * layer.linear.weight, -torch.eye(4), [1])] * HAS_OLD_NAME,
    ],
    ids=["variance", "count", "scale", "matrix", *["matrix, by the old name"] * HAS_OLD_NAME],
)
def test_what_does_not_hold_is_counted(compute: Callable[..., Tensor], x: Tensor, expected: list[int]) -> None:
    layer = Layer(lambda layer, x: compute(layer, x).sum())
    assert violations(capture(layer, (x,), {}, MESH), layer, x) == expected


def spectrum(x: Tensor, n_fft: int, window: Tensor, **options: Any) -> Tensor:
    return torch.stft(x, n_fft, window=window, return_complex=True, **options)


INVERSES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "as it was": (16, 16, {"hop_length": 4}, {"length": 96}),
    "as long as its frames": (16, 16, {"hop_length": 4}, {}),
    "longer": (16, 16, {"hop_length": 4}, {"length": 110}),
    "an odd size": (15, 15, {"hop_length": 3}, {"length": 60}),
    "a narrow window": (16, 12, {"win_length": 12, "normalized": True}, {}),
    "not centred": (16, 16, {"hop_length": 2, "center": False}, {}),
    "two-sided": (16, 16, {"hop_length": 4, "onesided": False}, {"length": 90}),
}


@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
@pytest.mark.parametrize("name", INVERSES)
def test_an_inverse_stft_is_torchs(name: str) -> None:
    n_fft, width, options, more = INVERSES[name]
    torch.manual_seed(0)
    window, inverse = torch.hann_window(width, dtype=torch.float64) + 0.1, torch.istft
    found = spectrum(torch.randn(3, 96, dtype=torch.float64), n_fft, window, **options)
    with library_checks_asserted():
        assert torch.istft is not inverse
        ours = [torch.istft(each, n_fft, window=window, **options, **more) for each in (found, found[0])]
    for got, of_torch in zip(ours, (found, found[0]), strict=True):
        torch.testing.assert_close(got, inverse(of_torch, n_fft, window=window, **options, **more))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_fft": 32},
        {"n_fft": 15},
        {"window": torch.ones(1)},
        {"win_length": 20, "window": torch.ones(20)},
        {"hop_length": 0},
        {"onesided": False},
        {"length": 0},
    ],
    ids=str,
)
def test_what_torch_refuses_of_an_inverse_stft_it_refuses(wrong: dict[str, Any]) -> None:
    options = {"n_fft": 16, "hop_length": 4, "window": torch.ones(16)} | wrong
    found = torch.stft(torch.randn(2, 96), 16, 4, window=torch.ones(16), return_complex=True)
    with library_checks_asserted(), pytest.raises(RuntimeError, match=r"istft|window|numel"):
        torch.istft(found, **options)


class Vocoder(nn.Module):
    """Masks the spectrum of a signal, and takes it back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = nn.Linear(9, 9)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = spectrum(x, 16, self.window, hop_length=4)
        found = found * self.mask(found.abs().mT).sigmoid().mT
        return (torch.istft(found, 16, 4, window=self.window, length=x.shape[-1]) - y).abs().mean()


def test_a_vocoder_trains_on_a_mesh() -> None:
    model, given = Vocoder(), {"x": torch.randn(8, 96), "y": torch.randn(8, 96)}
    parallel = autopar.compile(model, autopar.virtual_mesh(pp=2, dp=2), example_inputs=given, num_microbatches=2, backend="eager")
    assert parallel.verify(**given)
    model.window.zero_()
    with pytest.raises(AutoparError, match="windows do not overlap everywhere"):
        parallel(**given)


def test_torch_has_its_own_functions_again_after_a_capture() -> None:
    before = F.gaussian_nll_loss, torch.cov, torch.bincount, nn.BatchNorm1d.forward
    of(COMPUTED["covariance"][0], X)
    with pytest.raises(CaptureError):
        of(lambda layer, x: layer.linear(x) if x.sum() > 0 else x, X)
    assert (F.gaussian_nll_loss, torch.cov, torch.bincount, nn.BatchNorm1d.forward) == before
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        distributions.Normal(X, -X.abs(), validate_args=True)  # torch.compile turns the default off for the whole process
