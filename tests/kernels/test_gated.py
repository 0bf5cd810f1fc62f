"""The gated and biased activations against PyTorch's: values, gradients, tracing, refusals."""

from __future__ import annotations

import pytest
import torch

from autopar._torch import fake_mode
from autopar.kernels.gated import ACTIVATIONS, bias_activation, bias_activation_backward, gated, gated_backward
from tests.support.kernels.tracing import assert_traceable


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_pytorch(activation: str) -> None:
    torch.manual_seed(0)
    x, up = (torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gated(x, up, activation=activation), ACTIVATIONS[activation](x) * up)
    torch.testing.assert_close(bias_activation(x, bias, activation=activation), ACTIVATIONS[activation](x + bias))
    assert torch.autograd.gradcheck(lambda *inputs: gated(*inputs, activation=activation), (x, up))
    assert torch.autograd.gradcheck(lambda *inputs: bias_activation(*inputs, activation=activation), (x, bias))


def test_low_precision_is_rounded_once() -> None:
    x, up = torch.randn(300).bfloat16(), torch.randn(300).bfloat16()
    expected = (torch.nn.functional.silu(x.float()) * up.float()).bfloat16()
    assert torch.equal(gated(x, up, activation="silu"), expected)


def test_what_does_not_fit_is_refused() -> None:
    with fake_mode():
        x = torch.empty(2, 6)
        with pytest.raises(ValueError, match="no activation 'swish'; there are silu, gelu"):
            gated(x, x, activation="swish")
        with pytest.raises(ValueError, match=r"gate is \(2, 6\) of torch.float32, and up \(6,\)"):
            gated(x, torch.empty(6), activation="silu")
        with pytest.raises(ValueError, match=r"a bias \(5,\) does not fit rows of 6 columns"):
            bias_activation(x, torch.empty(5), activation="gelu")


def test_traces() -> None:
    x, up = (torch.randn(4, 3, 5).transpose(0, 1).requires_grad_() for _ in range(2))
    bias = torch.randn(5, requires_grad=True)
    assert_traceable(gated, (x, up), {"activation": "silu"}, backward="autopar.gated_backward.default")
    assert_traceable(bias_activation, (x, bias), {"activation": "gelu"}, backward="autopar.bias_activation_backward.default")
    assert_traceable(gated_backward, (x.detach(), x.detach(), up.detach()), {"activation": "gelu_tanh"})
    assert_traceable(bias_activation_backward, (x.detach(), x.detach(), bias.detach()), {"activation": "gelu"})
