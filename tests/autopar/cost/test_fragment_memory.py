"""What a fragment takes while it runs: counted by hand on graphs of a few ops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cost.fragment_memory import FragmentMemory, fragment_memory
from autopar.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autopar.kernels.softmax import softmax
from autopar.runtime._torch import AllocatorLog
from autopar.runtime.execute.eager_function import simplified
from tests.support.graphs import traced

aten = torch.ops.aten
SIZE = 4 * 8 * 4
CASES: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    # What is counted, in tensors of the input's size: at the peak, and left.
    "a result": (lambda x: aten.neg(x), 1, 1),
    "a value dies at its last use": (lambda x: aten.exp(aten.neg(x)), 2, 1),
    "and only then": (lambda x: aten.add(aten.exp(y := aten.neg(x)), y), 3, 1),
    "three in a row hold two": (lambda x: aten.cos(aten.exp(aten.neg(x))), 2, 1),
    "a view takes nothing": (lambda x: aten.neg(aten.t(x)), 1, 1),
    "a view keeps what it shows": (lambda x: aten.exp(aten.t(aten.neg(x))), 2, 1),
    "a view of an input is no result of its own": (lambda x: (aten.t(x), aten.neg(x)), 1, 1),
    "a copy takes memory": (lambda x: aten.neg(aten.reshape(aten.t(x), [32])), 2, 1),
    "one memory for two results": (lambda x: (y := aten.neg(x), aten.t(y)), 1, 1),
    "what is written in place is there already": (lambda x: aten.add_(aten.neg(x), x), 1, 1),
    "a part keeps the whole": (lambda x: aten.select(aten.neg(x), 0, 0), 1, 1),
}


def memory_of(function: Callable[[Tensor], Any], *inputs: Tensor, form: Any = None) -> FragmentMemory:
    def several(*given: Tensor) -> tuple[Tensor, ...]:
        found = function(*given)
        return found if isinstance(found, tuple) else (found,)

    module = traced(several, *inputs).module()
    return fragment_memory(module, form) if form is not None else fragment_memory(module)


@pytest.mark.parametrize("name", CASES)
def test_values_are_there_from_the_op_that_makes_them_to_their_last_use(name: str) -> None:
    function, peak, left = CASES[name]
    found = memory_of(function, torch.randn(4, 8))
    assert (found.peak_bytes, found.result_bytes) == (peak * SIZE, left * SIZE)
    assert sum(value.bytes for value in found.values) == found.peak_bytes


def test_what_an_op_of_ours_makes_for_itself_is_counted() -> None:
    """Softmax of ours is plain ops on a CPU: scores, what is raised, and the result are there together."""
    found = memory_of(lambda x: softmax(x, None, scale=1.0, dtype=torch.float32), torch.randn(4, 8))
    assert 3 * SIZE <= found.peak_bytes < 3.5 * SIZE and found.result_bytes == SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_backward", [False, True])
def test_of_one_that_looks_at_values_it_is_what_the_allocator_says(dtype: torch.dtype, is_backward: bool) -> None:
    """Cross entropy goes block by block, and counts the classes that are no padding; here are two blocks."""
    logits, labels, classes = torch.randn(2048, 96, dtype=dtype), torch.randint(96, (2048,)), torch.arange(96)
    rows = torch.rand(2048), torch.rand(2048), torch.rand(2048)

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        return cross_entropy(*given[:3])

    def backward(*given: Tensor) -> tuple[Tensor, ...]:
        return (cross_entropy_backward(given[3], given[4], None, *given[:3], given[5]),)

    function, inputs = (backward, (logits, labels, classes, *rows)) if is_backward else (forward, (logits, labels, classes))
    predicted = memory_of(function, *inputs).peak_bytes
    with AllocatorLog() as log, log.mark("all"):
        function(*inputs)
    sizes = accumulate(size for _, size in log.events)
    assert predicted == pytest.approx(max(sizes), rel=0.03)


def test_fragments_are_counted_in_the_form_in_which_they_run() -> None:
    """A product and its bias are one op for the backend "eager"."""
    inputs = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)
    product = 8 * 32 * 4
    assert memory_of(lambda x, w, b: aten.add(aten.mm(x, w), b), *inputs).peak_bytes == 2 * product
    assert memory_of(lambda x, w, b: aten.add(aten.mm(x, w), b), *inputs, form=simplified).peak_bytes == product


def test_the_peak_is_named() -> None:
    found = memory_of(lambda x: aten.neg(aten.sum(aten.exp(aten.neg(x)), [0])), torch.randn(4, 8))
    assert found.at.op == "exp.default" and [value.op for value in found.values] == ["neg.default", "exp.default"]


@pytest.mark.parametrize(
    ("size", "kernel", "groups"),
    [((4, 3, 8), 3, 1), ((4, 3, 8, 8), 3, 1), ((2, 3, 4, 4, 4), 3, 1), ((4, 3, 8, 8), 1, 1), ((4, 3, 8), 3, 3), ((4, 3, 8, 8), 3, 3)],
    ids=str,
)
def test_columns_of_a_convolution_in_float64_are_what_the_allocator_says(size: tuple[int, ...], kernel: int, groups: int) -> None:
    dims = len(size) - 2
    x = torch.randn(size, dtype=torch.float64)
    weight = torch.randn(6, 3 // groups, *[kernel] * dims, dtype=torch.float64)
    options = [1] * dims, [kernel // 2] * dims, [1] * dims, False, [0] * dims, groups

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution.default(x, weight, None, *options)

    def backward(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward.default(gradient, x, weight, None, *options, [True, True, False])[:2]

    for function, inputs in ((forward, (x, weight)), (backward, (x, weight, forward(x, weight)))):
        predicted = memory_of(function, *inputs).peak_bytes
        with AllocatorLog() as log, log.mark("all"):
            kept = function(*inputs)
        assert predicted == max(accumulate(size for _, size in log.events)), function
        del kept
