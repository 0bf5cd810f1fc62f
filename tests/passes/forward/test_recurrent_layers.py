"""Dropout between the layers of recurrent networks: torch's results where nothing is left to chance, and equal draws on any mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.forward.recurrent_layers import RECURRENT

LENGTH, SAMPLES, WIDTH, HIDDEN = 2, 8, 6, 4


class Recurrent(nn.Module):
    """One of torch's recurrent networks, with what it gives besides outputs read as well."""

    def __init__(self, make: Callable[..., nn.RNNBase], dropout: float, num_layers: int = 3, **options: object) -> None:
        super().__init__()
        self.layers = make(WIDTH, HIDDEN, num_layers, batch_first=True, dropout=dropout, dtype=torch.float64, **options)
        ways, width = 1 + self.layers.bidirectional, self.layers.proj_size or HIDDEN
        self.head = nn.Linear(ways * width, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.layers(x)
        finals = states if isinstance(states, tuple) else (states,)
        return self.head(outputs).square().mean() + sum(each.sin().mean() for each in finals)


KINDS: dict[str, Callable[[float], nn.Module]] = {
    "lstm": lambda p: Recurrent(nn.LSTM, p, num_layers=2),
    "lstm, projected": lambda p: Recurrent(nn.LSTM, p, num_layers=2, proj_size=3),
    "gru, both ways": lambda p: Recurrent(nn.GRU, p, num_layers=2, bidirectional=True),
    "rnn": lambda p: Recurrent(nn.RNN, p),
    "rnn, relu, no biases": lambda p: Recurrent(nn.RNN, p, nonlinearity="relu", bias=False),
}


def of(kind: Callable[[float], nn.Module], dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return kind(dropout)


X = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> list[Tensor]:
    loss = model(X)
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("dropout", [1.0, 1e-12])  # all are dropped; none is
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_where_nothing_is_left_to_chance_it_is_torchs(kind: Callable[[float], nn.Module], dropout: float) -> None:
    wanted = step(of(kind, dropout if dropout == 1.0 else 0.0))
    parallel = autopar.compile(of(kind, dropout), autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    got = step(parallel)
    assert len(got) == len(wanted) > 5
    for ours, torchs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gru, both ways"])
def test_draws_are_equal_on_any_mesh(kind: str) -> None:
    found: list[list[Tensor]] = []
    for axes in ({"dp": 1}, {"dp": 2}, {"pp": 2}):
        mesh = autopar.virtual_mesh(**axes)
        parallel = autopar.compile(of(KINDS[kind], 0.4), mesh, example_inputs=(X,), backend="eager", num_microbatches=2)
        found.append(step(parallel))
        if axes == {"dp": 2}:
            assert "no rank repeats another's work" in parallel.explain()
    first, *others = found
    kept = step(of(KINDS[kind], 0.0))
    assert not torch.allclose(first[0], kept[0], rtol=1e-3), "nothing was dropped"
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_each_call_draws_anew_and_is_verified_on_the_default_backend() -> None:
    model, x = of(lambda p: Recurrent(nn.RNN, p, num_layers=2), 0.4).float(), X.float()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,))
    assert parallel(x).item() != parallel(x).item()
    assert parallel.verify(x)


def test_one_layer_has_nothing_between() -> None:
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        model = of(lambda p: Recurrent(nn.LSTM, p, num_layers=1), 0.4)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(X,), backend="eager")
    assert not parallel.compiled.signature.inputs_of("random_key")
    assert any(node.target in RECURRENT for node in parallel.compiled.forms.forward.graph.nodes)
