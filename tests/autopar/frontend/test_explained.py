"""What a refused user reads first is what is wrong, then their line, then the way out; torch's own text comes last."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint_sequential

from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.passes.global_.trace_joint import TraceJoint
from tests.support.models import asserting
from tests.support.models.language import SIZES
from tests.support.models.layer import MESH, Layer, X, assert_as_model, of

READS, SIZE, FAILS = "reads the value of a tensor", "the size of a result depends on values", "Layer fails on these inputs: "


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.sum().item()
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.scale


def branch(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    while y.norm() > 1:
        y = y / 2
    return y.sum()


def formatted(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    print(f"mean {y.mean():.3f}")
    return y.sum()


def conditional(layer: Any, x: Tensor) -> Tensor:
    h = layer.linear(x)
    return torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h * 3, (h,)).sum()


def stepping(layer: Any, x: Tensor) -> Tensor:
    return torch.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (torch.tensor(0), layer.linear(x)))[1].sum()


def flexible(layer: Any, x: Tensor) -> Tensor:
    queries = layer.linear(x)[None, None]
    return flex_attention(queries, queries, queries).sum()


def parts_checkpointed(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint_sequential(nn.Sequential(layer.linear, nn.GELU()), 2, x, use_reentrant=False).sum()


def caught(layer: Layer, x: Tensor) -> Tensor:
    try:
        y = layer.linear(x[:, :2])
    except RuntimeError:
        y = layer.linear(x)
    return y.sum()


def otherwise_compiled(layer: Layer, x: Tensor) -> Tensor:
    scale: Any = None if torch.compiler.is_compiling() else [2.0]
    try:
        return layer.linear(x).sum() * scale[0]
    finally:
        layer.eval()


def generated(layer: Layer, x: Tensor) -> Iterator[Tensor]:
    yield layer.linear(x).sum()


def differentiated(layer: Layer, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer.linear(x).square().sum(), x, create_graph=True)[0].square().sum()


def packed(layer: Layer, x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(x[None], [8], batch_first=True)
    return layer.linear(rows.data).sum()


def connectionist(layer: Layer, x: Tensor) -> Tensor:
    return F.ctc_loss(layer.linear(x)[:, None].log_softmax(-1), torch.tensor([[1, 2]]), (8,), (2,))


def sparse_of_parts(layer: Layer, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(x.argmax(1).expand(2, 8), x[:, 0], (8, 8)), layer.linear(x)).sum()


TRANSFORM = "a transform of torch.func"

# By what a user may write: what the first line, and what the way out says.
MISTAKES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "if, while": (branch, READS, "torch.where"),
    "item": (lambda layer, x: layer.linear(x).sum() * x.sum().item(), READS, "before the call"),
    "tolist": (lambda layer, x: layer.linear(x).sum() * sum(x[0].tolist()), READS, "before the call"),
    "item in a Function": (lambda layer, x: Cube.apply(layer.linear(x)).sum(), READS, "before the call"),
    "index": (lambda layer, x: layer.linear(x)[:, x.argmax()].sum(), READS, "x.index_select(1, i.view(1)).squeeze(1)"),
    "slice": (lambda layer, x: layer.linear(x)[:, int(x.argmax()) : int(x.argmax()) + 2].sum(), READS, "x[:, i + torch.arange(n)]"),
    "item of a pytree": (lambda layer, x: layer.linear(x).sum() * pytree.tree_leaves({"x": x.sum()})[0].item(), READS, "before the call"),
    "vmap of rows": (lambda layer, x: torch.func.vmap(lambda row: x * row)(layer.linear.weight).sum(), TRANSFORM, "write its dim out"),
    "generator": (lambda layer, x: (y for y in (layer.linear(x),)), "no structure of tensors", "return tensors in tuples"),
    "f-string": (formatted, READS, "before the call"),
    "classes": (lambda layer, x: (layer.linear(x) * F.one_hot(x.argmax(1)).sum()).sum(), "how many classes", "one_hot(x, num_classes)"),
    "boolean index": (lambda layer, x: layer.linear(x)[x > 0].sum(), SIZE, "mask with torch.where"),
    "mask of parameters": (lambda layer, x: layer.linear(x)[:, layer.linear.bias > 0].sum(), SIZE, "keep the places: register_buffer("),
    "unique": (lambda layer, x: layer.linear(x).sum() * x.unique().numel(), SIZE, "mask with torch.where"),
    "bincount": (lambda layer, x: layer.linear(x).sum() * torch.bincount(x.argmax(1)).max(), SIZE, "minlength=n"),
    "packed": (packed, "a packed sequence has as many rows as the lengths say", "leave the sequences padded"),
    "ctc": (connectionist, "ctc_loss lays out its table by the longest target", "compute the loss outside"),
    "numpy": (lambda layer, x: layer.linear(torch.from_numpy(np.exp(x.numpy()))).sum(), "leaves torch for numpy", "torch's functions"),
    "python's random": (lambda layer, x: layer.linear(x).sum() * random.random(), "draws numbers by Python's", "draw by torch.rand"),
    "numpy's random": (lambda layer, x: layer.linear(x).sum() * np.random.rand(), "draws numbers by Python's", "draw by torch.rand"),
    "files": (lambda layer, x: layer.linear(x).sum() * len(Path(__file__).read_text()), "this line leaves the graph", "out of forward"),
    "the clock": (lambda layer, x: layer.linear(x).sum() * time.time(), "reads the clock", "measure around the call"),
    "deepcopy": (lambda layer, x: copy.deepcopy(layer.linear)(x).sum(), "this line leaves the graph", "out of forward"),
    "log": (lambda layer, x: logging.getLogger("x").info("%s", x.mean()) or layer.linear(x).sum(), "logs what a graph", "out of forward"),
    "moved": (lambda layer, x: layer.linear.to(x.device)(x).sum(), "moves or casts a module", "do it before autopar.compile"),
    "new parameter": (lambda layer, x: (layer.linear(x) * nn.Parameter(torch.ones(4))).sum(), "makes a parameter", "make it in __init__"),
    "sparse": (sparse_of_parts, "makes a sparse tensor", "index_add(0, rows"),
    "jvp": (lambda layer, x: torch.func.jvp(layer.linear, (x,), (x,))[1].sum(), "differentiates inside itself", "at two inputs"),
    "autograd": (differentiated, "differentiates inside itself", "compare outputs at two inputs"),
    "vmap": (lambda layer, x: torch.vmap(layer.linear)(x).sum(), "a transform of torch.func", "functional_call"),
    "vmap of grad": (lambda layer, x: vmap(grad(lambda v: layer.linear(v).sum()))(x).sum(), "differentiates inside", "at two inputs"),
    "sequential": (parts_checkpointed, "checkpoint_sequential is no region", "on each part, in a loop"),
    "cond": (conditional, "calls cond, an op of torch's with graphs of its own", "torch.where(condition, a, b)"),
    "while": (stepping, "calls while_loop, an op of torch's with graphs of its own", "for step in range(n)"),
    "flex": (flexible, "flex_attention has graphs of its own", "scaled_dot_product_attention"),
    "shapes": (lambda layer, x: layer.linear(x[:, :2]).sum(), FAILS + "RuntimeError: ", "it fails there, too"),
    "dtypes": (lambda layer, x: layer.linear(x).gather(1, x).sum(), FAILS + "RuntimeError: ", "it fails there, too"),
    "devices": (lambda layer, x: (layer.linear(x) + torch.ones(4, device="meta")).sum(), "a tensor on meta", "device=x.device"),
    "names": (lambda layer, x: layer.lin(x).sum(), FAILS + "AttributeError: 'Layer' object has no attribute 'lin'", "it fails there, too"),
    "uncaught": (otherwise_compiled, FAILS + "TypeError: 'NoneType' object is not subscriptable", "torch.compiler.is_compiling()"),
    "in place": (lambda layer, x: layer.linear.weight.mul_(2).sum(), "a leaf Variable that requires grad", "it fails there, too"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_refusal_says_what_where_and_how(mistake: str, capfd: pytest.CaptureFixture[str]) -> None:
    compute, what, mend = MISTAKES[mistake]
    with pytest.raises(CaptureError) as caught_error:
        of(compute, X)
    lines = str(caught_error.value).splitlines()
    assert what in lines[0], lines
    assert lines[1].startswith(f"  where: {__file__}:") and len(lines[1].partition(".py:")[2].partition("  ")[2]) > 10, lines
    assert lines[2].startswith("  how to mend it: ") and mend in lines[2], lines
    assert len(lines) == 3 or (len(lines) == 4 and lines[3].startswith("  torch says: ") and len(lines[3]) < 500), lines
    assert "Traceback" not in capfd.readouterr().err, "torch reports what is handled"


def test_what_forward_catches_is_as_in_the_model_or_refused() -> None:
    try:
        program = of(caught, X)
    except CaptureError as error:  # Before torch 2.15 Dynamo does not see what an op raises.
        what, where, mend = str(error).splitlines()
        assert "this line of Layer fails on these inputs: RuntimeError: " in what and "y = layer.linear(x[:, :2])" in where
        assert "decide by the shapes instead" in mend
    else:
        assert_as_model(Layer(caught), (X,), {}, program)


@pytest.mark.parametrize("compute", [asserting.negated, asserting.telling])
def test_an_assert_that_cannot_be_kept_says_how_it_can(compute: Callable[[Layer, Tensor], Tensor]) -> None:
    expected = rf"this assert cannot be kept for the run.*\n  where: {asserting.__file__}:\d+  assert .*\n.*`assert \(~bad\)\.all\(\)`"
    with pytest.raises(CaptureError, match=expected):
        of(compute, X)


TEACHER = nn.Linear(4, 4).requires_grad_(False)


class Taught(nn.Module):
    def __init__(self, held: Any, get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.held, self.get = nn.Linear(4, 4), held, get

    def forward(self, x: Tensor) -> Tensor:
        held = self.get(self.held)
        with torch.no_grad():
            target = held(x) if isinstance(held, nn.Linear) else x @ held
        return (self.linear(x) - target).square().sum()


@pytest.mark.parametrize(
    "held",
    [[TEACHER], (TEACHER,), {0: TEACHER}, [nn.Parameter(torch.ones(4, 4))], None],
    ids=["list", "tuple", "dict", "parameter", "global"],
)
def test_a_module_outside_of_the_model_is_refused_with_the_way_into_it(held: Any) -> None:
    with pytest.raises(CaptureError) as caught_error:
        capture(Taught(held, (lambda held: TEACHER) if held is None else lambda held: held[0]), (X,), {}, MESH)
    what, where, mend, torchs = str(caught_error.value).splitlines()
    assert "computes with a parameter that is none of the model's: the module that has it is no submodule" in what
    assert f"{__file__}:" in where and "def forward" in where
    assert "self.teacher = teacher" in mend and "requires_grad_(False)" in mend and torchs.startswith("  torch says: KeyError: ")


def test_an_input_that_is_a_plain_object_is_said_to_be_one() -> None:
    with pytest.raises(CaptureError, match=r"an input is an object that is no structure of tensors\n"):
        of(lambda layer, x, tree: layer.linear(x).sum(), X, Fraction(1, 2))


def test_a_missing_argument_names_it() -> None:
    with pytest.raises(
        CaptureError, match=r"missing 1 required positional argument: 'y'\n.*\n  how to mend it: example_inputs, and each call"
    ):
        of(lambda layer, x, y: layer.linear(x + y).sum(), X)


def test_what_yields_is_refused_with_the_line_of_its_forward() -> None:
    class Yielding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield self.linear(x).sum()

    with pytest.raises(CaptureError, match=r"no structure of tensors .*\n  where: in .*test_explained\.py:\d+  def forward"):
        capture(Yielding(), (X,), {}, MESH)


def test_inside_a_library_the_users_line_comes_first() -> None:
    config = transformers.MixtralConfig(**SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 4})

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.MixtralForCausalLM(config)
            self.inner.set_experts_implementation("eager")

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids).logits.sum()

    with pytest.raises(CaptureError) as caught_error:
        capture(Wrapped(), (torch.arange(8)[None],), {}, MESH)
    lines = str(caught_error.value).splitlines()
    assert lines[1].startswith(f"  where: {__file__}:") and lines[1].endswith("return self.inner(ids).logits.sum()"), lines
    assert lines[2].startswith("  inside: ") and "transformers" in lines[2], lines


def scaled_in_place(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.linear.weight.mul_(0.5)
    return layer.linear(x).sum()


def sparse(layer: Layer, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), layer.linear.weight).sum()


def test_a_parameter_written_in_forward_is_refused_with_the_line_that_writes() -> None:
    expected = r"parameter 'linear\.weight' in forward\n  where: .*test_explained.*linear\.weight\.mul_\(0\.5\)\n.*outside of forward"
    with pytest.raises(CaptureError, match=expected):
        TraceJoint().apply(of(scaled_in_place, X))


def test_a_sparse_tensor_is_refused_with_the_line_that_makes_it() -> None:
    expected = r"a tensor of layout torch\.sparse_coo.*\n  where: .*test_explained.*x\.to_sparse\(\).*\n.*compute with dense"
    with pytest.raises(CaptureError, match=expected):
        of(sparse, X)


def test_a_branch_that_only_raises_is_refused_with_its_assert() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not (x > 0).all() and not (x < 0).all():
                raise ValueError("mixed signs")
            return x.sum()

    with pytest.raises(CaptureError, match=r"assert \(a \| b\)\.all\(\), 'text' for if not a and not b: raise ValueError"):
        capture(Checked(), (torch.ones(4, 4),), {}, MESH)
