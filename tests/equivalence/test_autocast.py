"""A model under the user's own `torch.autocast` has the casts of eager autocast, op by op, and its losses and gradients, on any mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import ParallelModule
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.runtime.verify.report import error_of
from tests.support.captures import compiled
from tests.support.models import language, vision, zoo
from tests.support.models.zoo import Case

MODELS = {**zoo.ZOO, **language.ZOO, **vision.ZOO}
NAMES = ("gpt2", "llama", "bert", "vit", "bloom", "opt", "t5", "bart", "resnet", "swin", "gemma", "qwen3")
MESHES: dict[str, dict[str, int]] = {"tp2": {"tp": 2}, "dp2×tp2": {"dp": 2, "tp": 2}, "pp2": {"pp": 2}}
QUICK = {("llama", "dp2×tp2"), ("gpt2", "pp2")}
OFTEN = ("llama", "t5", "resnet", "deberta-v2")
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case)) for case in product(NAMES, MESHES)]


def case_of(name: str, num_layers: int = 1) -> Case:
    return MODELS[name](num_layers).to(torch.float32)


class _Casts(TorchDispatchMode):
    """Counts casts between floats, and ops by the dtypes that they take and yield."""

    def __init__(self) -> None:
        super().__init__()
        self.casts, self.calls = Counter[Any](), Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, made = _floats((args, kwargs or {})), _floats(result)
        if func is torch.ops.aten._to_copy.default and taken and made:
            self.casts[taken, made] += 1
        # Masks and their like are made in Python as the trace of a model sees it, and eager attention otherwise.
        elif func.overloadpacket.__name__ in _COMPUTING:
            self.calls[str(func), taken, made] += 1
        return result


_COMPUTING = {
    "addmm", "mm", "bmm", "convolution", "_softmax", "_log_softmax", "native_layer_norm", "native_batch_norm", "gelu", "relu", "silu",
    "tanh", "pow", "rsqrt", "mean", "mse_loss", "nll_loss_forward", "embedding",
}  # fmt: skip


def _floats(values: Any) -> tuple[torch.dtype, ...]:
    return tuple(leaf.dtype for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in (*NAMES, "mixtral", "deberta-v2")]
)
def test_the_casts_are_those_of_eager_autocast(name: str) -> None:
    case = case_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(case.model, (), case.batch, virtual_mesh(dp=1))
        with _Casts() as eager:
            wanted = case.model(**case.batch).loss
    state = dict(case.model.named_parameters(remove_duplicate=False)) | dict(case.model.named_buffers(remove_duplicate=False))
    leaves = list(case.batch.values())
    values = [
        program.constants[item.name] if item.kind == "constant" else leaves[int(item.name)] if item.kind == "batch" else state[item.name]
        for item in program.signature.inputs
    ]
    with _Casts() as ours:
        (found,) = Interpreter(program.module()).run(*values)
    assert ours.casts == eager.casts and ours.casts.total() > 10
    assert ours.calls == eager.calls
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_loss_and_gradients_are_those_of_eager_autocast(name: str, mesh: str) -> None:
    case = case_of(name, 1 if (name, mesh) in QUICK and mesh != "pp2" else 2)
    with torch.autocast("cpu", torch.bfloat16):
        parallel = compiled(case.model, MESHES[mesh], case.batch)
        exact, low = parallel.verify(promote=True, **case.batch), parallel.verify(**case.batch)
    assert exact and exact.worst <= 1e-9 and exact.reference == "original model", str(exact)
    assert low and low.reference == "original model" and low.cast_error is not None, str(low)
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()
    assert_rounded_alike(case, parallel)


def assert_rounded_alike(case: Case, parallel: ParallelModule) -> None:
    """Loss and gradients are no farther from those in float32 than twice what eager autocast's are."""
    found = []
    for model, is_low in ((parallel, True), (case.model, True), (case.model, False)):
        case.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            loss = model(**case.batch).loss
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in case.model.parameters() if parameter.grad is not None]
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        found.append((loss.detach().reshape(1), torch.cat(gradients)))
    for ours, eagers, exact in zip(*found, strict=True):
        assert error_of(ours, exact) <= 2 * error_of(eagers, exact) + 1e-3


class Regions(nn.Module):
    """A region of bfloat16 with a disabled one inside, and a product in float32 behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.norm(self.first(x)).relu()
            with torch.autocast("cpu", enabled=False):
                scores = hidden.float() @ hidden.float().mT
            hidden = self.second(torch.einsum("bst,btd->bsd", scores, hidden))
        return nn.functional.cross_entropy(self.head(hidden.float()).flatten(0, 1), labels.flatten())


def regions() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Regions(), (torch.randn(4, 6, 8), torch.randint(0, 4, (4, 6)))


@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        pytest.param({"dp": 2, "tp": 2}, "eager", id="dp2×tp2, eager"),
        pytest.param({"pp": 2}, "eager", id="pp2, eager"),
        pytest.param({"pp": 2}, "inductor", id="pp2, inductor", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, "inductor", id="dp2×tp2, inductor", marks=pytest.mark.slow),
    ],
)
def test_regions_in_forward(mesh: dict[str, int], backend: str) -> None:
    model, batch = regions()
    parallel = compiled(model, mesh, batch, backend=backend)
    report = parallel.verify(*batch, promote=True)
    assert report and report.reference == "original model", str(report)
    loss = parallel(*batch)
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    wanted = torch.autograd.grad(model(*batch), list(model.parameters()))
    assert all(grad is not None and grad.dtype == torch.float32 for grad in found)
    assert max(error_of(grad, other) for grad, other in zip(found, wanted, strict=True)) < 0.02


LOW_TIMES_FULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda h, w: torch.bmm(h, w.expand(len(h), 8, 8)),
    "baddbmm": lambda h, w: torch.baddbmm(h, h, w.expand(len(h), 8, 8)),
    "einsum": lambda h, w: torch.einsum("bij,jk->bik", h, w),
    "attention": lambda h, w: nn.functional.scaled_dot_product_attention(h, h @ w, w.expand(len(h), 8, 8)),
}


class Mixed(nn.Module):
    """In a region of bfloat16 an op of operands that are not of one dtype, which autocast casts."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.weight, self.compute = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), compute

    @torch.autocast("cpu", torch.bfloat16)
    def low(self, x: Tensor) -> Tensor:
        return self.compute(self.first(x), self.weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(x)
        return {"loss": low.float().square().mean(), "low": low}


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("name", LOW_TIMES_FULL)
def test_a_region_of_forward_casts_operands_to_one_dtype(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Mixed(LOW_TIMES_FULL[name]), torch.randn(4, 8, 8)
    parallel = compiled(model, mesh, (x,), outputs="all")
    assert parallel.verify(x) and parallel.verify(x, promote=True)
    found, wanted = parallel(x), model(x)
    assert found["low"].dtype == wanted["low"].dtype == torch.bfloat16
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=0.01, atol=0.0)


def test_a_layer_of_an_lstm_gives_the_dtype_of_eager_autocast() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8), torch.randn(5, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            wanted, _ = model(x)
        except RuntimeError:
            pytest.skip("oneDNN has no LSTM in bfloat16 for this CPU")
        program = capture(model, (x,), {}, virtual_mesh(dp=1), outputs="all")
    assert program.signature.outputs[0].dtype == wanted.dtype


def test_calls_within_and_without_are_captured_apart() -> None:
    case = case_of("gpt2")
    parallel = compiled(case.model, {"dp": 2}, case.batch)
    plain = parallel(**case.batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        low = parallel(**case.batch).loss
    assert len(parallel._captures) == 2
    assert torch.equal(parallel(**case.batch).loss, plain) and len(parallel._captures) == 2
    assert 0 < abs(float(low.detach()) - float(plain.detach())) < 0.01
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(parallel(**case.batch).loss, low) and len(parallel._captures) == 2


def test_backward_runs_inside_and_outside_of_the_context_alike() -> None:
    found = []
    for inside in (True, False):
        model, batch = regions()
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(model, {"dp": 2, "tp": 2}, batch)(*batch)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
