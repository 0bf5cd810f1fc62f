"""What Inductor is given for a CPU in place of ops of ours computes the same, of the same form, and is made of torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.schedule import Fragment
from autopar.kernels.attention import attention, attention_backward
from autopar.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autopar.kernels.dropout import add_dropout, dropout
from autopar.kernels.gated import ACTIVATIONS, bias_activation, bias_activation_backward, gated, gated_backward
from autopar.kernels.normalisation import add_norm, norm, norm_backward
from autopar.kernels.registration import DECOMPOSITIONS
from autopar.kernels.rotary import rotary, rotary_backward
from autopar.kernels.softmax import softmax, softmax_backward
from autopar.runtime.execute.fragments import CompiledFragments
from tests.support.kernels.attention import NOTHING, PLAIN

FULL = (2, 4, 6)
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
DROPPED: dict[str, Any] = {"keep_below": 2**31, "scale": 2.0}


def x(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape or FULL, dtype=torch.float64).to(dtype)


def crossing(dtype: torch.dtype) -> Case:
    """With gaps between classes, padding behind them, and labels of another rank."""
    return cross_entropy, (x(dtype), torch.randint(0, 9, (2, 4)), torch.tensor([0, 2, 3, 7, -1, -1])), {}


def crossing_back(dtype: torch.dtype, *given: bool) -> Case:
    _, operands, _ = crossing(dtype)
    log_sum_exp, *_ = cross_entropy(*operands)
    gradients = [torch.randn_like(log_sum_exp) if there else None for there in given]
    if gradients[0] is not None:
        gradients[0][0] = 0.0
        operands[0][0, 1] = torch.inf  # of a row without a gradient
    return cross_entropy_backward, (*gradients, *operands, log_sum_exp), {}


def norm_back(dtype: torch.dtype, centred: bool, weight: bool, bias: bool, total: bool) -> Case:
    """Weights stay in float32 beside 16-bit values."""
    value, scale = x(dtype), x(torch.float64 if dtype == torch.float64 else torch.float32, 6)
    _, mean, reciprocal = norm(value, scale, None, eps=1e-5, centred=centred)
    operands = (x(dtype), x(dtype) if total else None, value, mean, reciprocal, scale if weight else None)
    return norm_backward, operands, {"centred": centred, "has_bias": bias}


def positions() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(0, 1 << 20, (4, 1)), torch.randint(0, 1 << 32, (2, 1, 1)), torch.arange(6)


def heads(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return x(dtype, 2, 6, 4, 8).transpose(1, 2), x(dtype, 2, 2, 6, 8), x(dtype, 2, 2, 6, 8)


def attending(dtype: torch.dtype, *mask: Tensor | None, **options: Any) -> Case:
    return attention, (*heads(dtype), *(mask or NOTHING)), PLAIN | options


def attending_back(dtype: torch.dtype, *mask: Tensor | None, **options: Any) -> Case:
    _, operands, options = attending(dtype, *mask, **options)
    out, log_sum_exp = attention(*operands, **options)
    return attention_backward, (torch.randn_like(out), None, *operands, out, log_sum_exp), options


MASK, DOCUMENTS = torch.ones(6, 6, dtype=torch.bool).tril(), torch.tensor([[0, 0, 1, 1, 1, 2]])
CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "cross entropy": crossing,
    "cross entropy backward": lambda dtype: crossing_back(dtype, True, True, True),
    "cross entropy backward, of sums": lambda dtype: crossing_back(dtype, True, False, False),
    "cross entropy backward, of picked": lambda dtype: crossing_back(dtype, False, True, False),
    "softmax": lambda dtype: (softmax, (x(dtype), x(dtype, 4, 6) > 0), {"scale": 0.5, "dtype": dtype}),
    "softmax backward": lambda dtype: (softmax_backward, (x(dtype), x(dtype).softmax(-1)), {"scale": 0.5, "dtype": dtype}),
    "layer norm": lambda dtype: (norm, (x(dtype), x(dtype, 6), x(dtype, 6)), {"eps": 1e-5, "centred": True}),
    "layer norm, plain": lambda dtype: (norm, (x(dtype), None, None), {"eps": 1e-5, "centred": True}),
    "RMS norm": lambda dtype: (norm, (x(dtype), x(dtype, 6), None), {"eps": 1e-5, "centred": False}),
    "norm of a sum": lambda dtype: (add_norm, (x(dtype), x(dtype), x(dtype, 6), x(dtype, 6)), {"eps": 1e-5, "centred": True}),
    "layer norm backward": lambda dtype: norm_back(dtype, centred=True, weight=True, bias=True, total=True),
    "layer norm backward, plain": lambda dtype: norm_back(dtype, centred=True, weight=False, bias=False, total=False),
    "RMS norm backward": lambda dtype: norm_back(dtype, centred=False, weight=True, bias=False, total=True),
    "rotary": lambda dtype: (rotary, (heads(dtype)[0], x(dtype, 2, 1, 6, 4), x(dtype, 2, 1, 6, 4)), {"interleaved": False}),
    "rotary, interleaved": lambda dtype: (rotary, (heads(dtype)[1], x(dtype, 6, 8), x(dtype, 6, 8)), {"interleaved": True}),
    "rotary backward": lambda dtype: (rotary_backward, (heads(dtype)[1], x(dtype, 6, 4), x(dtype, 6, 4)), {"interleaved": False}),
    "rotary backward, in pairs": lambda dtype: (rotary_backward, (heads(dtype)[0], x(dtype, 6, 4), x(dtype, 6, 4)), {"interleaved": True}),
    "dropout": lambda dtype: (dropout, (x(dtype), *positions()), DROPPED | {"dtype": dtype}),
    "dropout to float32": lambda dtype: (dropout, (x(dtype), *positions()), DROPPED | {"dtype": torch.float32}),
    "dropout and residual": lambda dtype: (add_dropout, (x(dtype), x(dtype), *positions()), DROPPED),
    "attention": attending,
    "attention, causal": lambda dtype: attending(dtype, is_causal=True),
    "attention, masked": lambda dtype: attending(dtype, MASK, *NOTHING[1:], window=3),
    "attention, documents": lambda dtype: attending(dtype, None, DOCUMENTS, DOCUMENTS, *NOTHING[3:]),
    "attention backward": attending_back,
    "attention backward, masked": lambda dtype: attending_back(dtype, MASK, *NOTHING[1:]),
}
ACTIVATED = {
    gated: (FULL, FULL),
    gated_backward: (FULL,) * 3,
    bias_activation: (FULL, FULL[-1:]),
    bias_activation_backward: (FULL, FULL, FULL[-1:]),
}


def activated(op: Any, name: str, dtype: torch.dtype) -> Case:
    return op, tuple(x(dtype, *shape) for shape in ACTIVATED[op]), {"activation": name}


CASES |= {f"{op.name()}, {name}": partial(activated, op, name) for name in ACTIVATIONS for op in ACTIVATED}


def results_of(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def ops_in(function: Callable[..., Any], operands: tuple[Any, ...], options: dict[str, Any]) -> set[str]:
    """Traced as a compiler does, on tensors without values."""
    tensors = [each for each in operands if isinstance(each, Tensor)]

    def call(*given: Tensor) -> Any:
        left = iter(given)
        return function(*(next(left) if isinstance(each, Tensor) else each for each in operands), **options)

    graph = make_fx(call, tracing_mode="fake")(*tensors).graph
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_op_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    op, operands, options = CASES[name](dtype)
    expected, found = results_of(op(*operands, **options)), results_of(DECOMPOSITIONS[op](*operands, **options))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(expected, found, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_is_made_of_ops_of_torch(name: str) -> None:
    op, operands, options = CASES[name](torch.float32)
    assert not {each for each in ops_in(DECOMPOSITIONS[op], operands, options) if each.startswith("autopar")}


@pytest.mark.parametrize(
    "case",
    [
        lambda: attending(torch.float32, soft_cap=2.0),
        lambda: attending_back(torch.float32, x(torch.float32, 6, 6), *NOTHING[1:]),
        lambda: attending_back(torch.float32, soft_cap=2.0),
    ],
)
def test_attention_that_looks_at_values_or_has_no_kernel_of_torch_stays_an_op(case: Callable[[], Case]) -> None:
    op, operands, options = case()
    assert ops_in(DECOMPOSITIONS[op], operands, options) >= {str(op)}


def test_compiled_dropouts_keep_what_the_op_keeps() -> None:
    """Integers of 64 bits, in vectors: forward and backward draw apart, so that each bit counts."""
    op, operands, options = dropout, (torch.ones(2, 4, 64), *positions()[:2], torch.arange(64)), DROPPED | {"dtype": torch.float32}
    compiled = torch.compile(partial(DECOMPOSITIONS[op], **options), backend="inductor")
    assert torch.equal(compiled(*operands), op(*operands, **options))


def normalised(backend: str) -> tuple[Tensor, ...]:
    """A fragment of two norms."""
    graph = Graph()
    value = graph.placeholder("value")
    for _ in range(2):
        value = graph.call_function(getitem, (graph.call_function(norm, (value, None, None), {"eps": 1e-5, "centred": True}), 0))
    graph.output((value,))
    fragments = {"f": Fragment("f", GraphModule({}, graph))}
    return CompiledFragments(fragments, backend).run("f", [torch.arange(24.0).view(4, 6).square()])


def test_inductor_gets_them_and_other_backends_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    decomposition = DECOMPOSITIONS[norm]

    def counted(x: Tensor, *others: Any, **options: Any) -> Any:
        calls.append(x.shape)
        return decomposition(x, *others, **options)

    monkeypatch.setitem(DECOMPOSITIONS, norm, counted)
    plain = normalised("eager")
    assert not calls and torch.equal(normalised("aot_eager")[0], plain[0]) and not calls
    torch.testing.assert_close(normalised("inductor"), plain)
    assert calls  # while it traces
