"""The joint trace: inputs, outputs, phases and values of forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.checks.checker import check
from autopar.driver.manager import run_passes
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.ir.keys import PHASE, SOURCE
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Form, Program
from autopar.passes.global_.trace_joint import trace_joint
from tests.support.captures import compiled, kept_capture
from tests.support.models.zoo import ZOO
from tests.support.programs import FORWARD_PASSES, assert_close, inputs_of, run, run_forward

aten = torch.ops.aten
MESH = virtual_mesh(dp=2)


class Layer(nn.Module):
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


X = torch.randn(8, 4, dtype=torch.float64)


def joint_of(compute: Callable[..., Any], training: bool = True, **options: Any) -> Program:
    model = Layer(compute)
    forward = capture(model, (X,), {}, MESH, **options)
    joint = trace_joint(forward, training)
    check(joint)
    inputs = inputs_of(joint, model, (X,), {})
    wanted = run_forward(forward, inputs)
    if not training:
        wanted = {key: value for key, value in wanted.items() if key[0] != "gradient"}
    assert_close(run(joint, inputs), wanted, 1e-12)
    return joint


def calls(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_the_zoo(name: str) -> None:
    case = ZOO[name](dropout=0.1)
    program = run_passes(kept_capture(case.model, (), case.batch, MESH), FORWARD_PASSES)
    joint = trace_joint(program, training=True)
    inputs = inputs_of(joint, case.model, (), case.batch)
    assert_close(run(joint, inputs), run_forward(program, inputs), 1e-10)
    assert len(joint.signature.outputs_of("gradient")) == len([p for p in case.model.parameters() if p.requires_grad])


def test_inputs_and_outputs() -> None:
    joint = joint_of(lambda self, x: (self.linear(x) * self.frozen).sum())
    assert joint.form is Form.GLOBAL
    assert [(item.kind, item.name) for item in joint.signature.inputs] == [
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
        ("parameter", "frozen"),
        ("batch", "0"),
        ("tangent", "0"),
    ]
    assert [(item.kind, item.name) for item in joint.signature.outputs] == [
        ("loss", "0"),
        ("gradient", "linear.weight"),
        ("gradient", "linear.bias"),
    ]
    assert [node.name for node in joint.placeholders] == ["p_linear_weight", "p_linear_bias", "p_frozen", "input_0", "tangent_0"]


def test_forward_comes_before_backward() -> None:
    joint = joint_of(lambda self, x: self.linear(self.linear(x).tanh()).square().sum())
    phases = [PHASE[node] for node in joint.graph.nodes if node.op == "call_function"]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    assert set(phases) == {"forward", "backward"}
    tangent = joint.placeholders[-1]
    assert all(PHASE[user] == "backward" for user in tangent.users)
    backward = [node for node in joint.graph.nodes if node.op == "call_function" and PHASE[node] == "backward"]
    assert all(SOURCE[node].module in ("linear", "") and SOURCE[node].file for node in backward)


def test_what_only_the_backward_needs_is_there() -> None:
    joint = joint_of(lambda self, x: self.linear(x).square().sum())
    by_phase = {phase: [node.target for node in joint.graph.nodes if PHASE.get(node) == phase] for phase in ("forward", "backward")}
    assert by_phase["forward"].count(aten.t.default) == 1, "the weight's transpose for x @ wᵀ"
    assert aten.pow.Tensor_Scalar in by_phase["forward"] and aten.pow.Tensor_Scalar in by_phase["backward"]


def test_several_outputs_have_several_tangents() -> None:
    joint = joint_of(lambda self, x: {"a": self.linear(x), "b": x * 2, "c": self.linear(x).sum(1)}, outputs="all")
    assert [item.name for item in joint.signature.inputs_of("tangent")] == ["0", "2"]
    assert [item.shape for item in joint.signature.inputs_of("tangent")] == [(8, 4), (8,)]


def test_an_output_that_is_an_input_or_another_output() -> None:
    joint = joint_of(lambda self, x: [y := self.linear(x), y, x, self.frozen])
    assert [item.name for item in joint.signature.outputs_of("output")] == ["0", "1", "2", "3"]


def test_inference_has_no_backward() -> None:
    joint = joint_of(lambda self, x: self.linear(x).square().sum(), training=False)
    assert [item.kind for item in joint.signature.outputs] == ["loss"]
    assert not joint.signature.inputs_of("tangent")
    assert {PHASE[node] for node in joint.graph.nodes if node.op == "call_function"} == {"forward"}


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: torch.addmm(self.linear.bias, x, self.linear.weight, beta=2, alpha=3).sum(),
        lambda self, x: torch.baddbmm(self.frozen, x[None], self.linear.weight[None], beta=0.5).square().sum(),
        lambda self, x: self.linear(x).mean(),
        lambda self, x: (self.linear(x).mean(1, keepdim=True) * self.linear(x).mean((0, 1))).sum(),
        lambda self, x: self.linear(x).mean(-1, dtype=torch.float64).square().sum(),
    ],
    ids=["addmm", "baddbmm", "mean", "mean of dims", "mean of a type"],
)
def test_means_and_fused_products_are_plain(compute: Callable[..., Any]) -> None:
    found = calls(joint_of(compute))
    assert not any("addmm" in call or "baddbmm" in call or "mean" in call for call in found), found


def test_nothing_is_written_in_place() -> None:
    def compute(self: Layer, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y * 1
        y.mul_(2)
        y[:, 0] = 1
        return y.square().sum()

    for node in joint_of(compute).graph.nodes:
        assert not getattr(getattr(node.target, "_schema", None), "is_mutable", False), node.format_node()


def test_what_is_made_beside_a_tensor_is_made_without_it() -> None:
    """`x.new_zeros` asks x for no more than dtype and device; as its operand x would be gathered."""

    def compute(self: Layer, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y * (y.new_zeros([4]) + y.new_ones([8, 1]) + y.new_full([4], 2.0))).sum() + y[torch.tensor([0, 0, 3])].sum()

    joint = joint_of(compute)
    made = [node for node in joint.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert {node.target for node in made} == {aten.full.default}
    assert not [name for name in calls(joint) if "new_" in name]


def _positive(x: Tensor) -> Tensor:
    return x.mT @ x + torch.eye(4, dtype=x.dtype)


LINEAR_ALGEBRA: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": lambda x: torch.linalg.inv(_positive(x)),
    "solve": lambda x: torch.linalg.solve(_positive(x), x[:4]),
    "cholesky": lambda x: torch.linalg.cholesky(_positive(x)),
    "cholesky, upper": lambda x: torch.linalg.cholesky(_positive(x), upper=True),
    **({"cholesky of old": lambda x: torch.cholesky(_positive(x))} if hasattr(aten, "cholesky") else {}),  # not in torch 2.15
    "matrix power": lambda x: torch.linalg.matrix_power(_positive(x), -2),
    "LU": lambda x: torch.linalg.lu_factor(_positive(x))[0],
    "determinants": lambda x: torch.linalg.det(_positive(x)) + torch.linalg.slogdet(_positive(x))[1],
    "QR": lambda x: torch.linalg.qr(x)[1],
    "eigenvalues": lambda x: torch.linalg.eigvalsh(_positive(x)),
    "eigenvalues of any matrix": lambda x: torch.linalg.eigvals(_positive(x)).real.square().sum(),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "a normal distribution": lambda x: torch.distributions.MultivariateNormal(x.mean(0), _positive(x), validate_args=False).log_prob(x),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_linear_algebra(name: str) -> None:
    """Ops that check for errors in eager, forward or backward: the program has no place for an effect."""
    joint_of(lambda self, x: LINEAR_ALGEBRA[name](self.linear(x)).square().sum())


def test_effects_are_refused() -> None:
    def prints(self: Layer, x: Tensor) -> Tensor:
        torch.ops.aten._print("a step")
        return self.linear(x).sum()

    with pytest.raises(CaptureError, match=r"aten._print.default does something beside its results"):
        trace_joint(capture(Layer(prints), (X,), {}, MESH), training=True)


def test_what_the_backward_needs_is_not_overwritten() -> None:
    """Eager takes the gradient at the new value where the write goes through `.data`."""

    def written(self: Layer, x: Tensor) -> Tensor:
        rows = self.linear(x).relu()
        rows.data[:, 0] = 0.0
        return rows.exp().sum()

    with pytest.raises(CaptureError, match=r"needs a value into which forward writes[^\n]*written in place:\n[\s\S]*make a new tensor"):
        trace_joint(capture(Layer(written), (X,), {}, MESH), training=True)


def test_what_torch_cannot_write_in_place_is_refused_with_its_line() -> None:
    def written(self: Layer, x: Tensor) -> Tensor:
        rows = self.linear(x.view(2, 4, 4)).transpose(1, 2)
        return rows.masked_fill_(rows > 0.1, 0.5).sum()

    with pytest.raises(CaptureError, match=r"aten.masked_fill_.Scalar fails .*\n  where: .*rows.masked_fill_.*\n.*make a new tensor"):
        trace_joint(capture(Layer(written), (X,), {}, MESH), training=True)


class OfPositions(nn.Module):
    """A convolution of what has its channels last: x[b, positions, 8], as attention over a feature map gives it."""

    def __init__(self, convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, space: tuple[int, ...]) -> None:
        super().__init__()
        self.linear, self.convolution, self.space = nn.Linear(8, 8), convolution, space

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(self.linear(x).transpose(1, 2).reshape(-1, 8, *self.space)).square().mean()


@pytest.mark.parametrize(
    ("convolution", "space"),
    [
        (nn.Conv1d(8, 8, 1), (8,)),
        (nn.Conv2d(8, 8, 1), (4, 2)),
        (nn.Conv2d(8, 8, 3, padding=1, groups=2), (4, 2)),
        (nn.Conv3d(8, 8, 1), (2, 2, 2)),
    ],
)
def test_convolutions_have_the_strides_that_they_have_in_a_run(convolution: Any, space: tuple[int, ...]) -> None:
    """In float32, of so many samples that torch would choose other kernels, were oneDNN disabled in the trace; half of them on a rank."""
    x = torch.randn(16, 8, 8)
    parallel = compiled(OfPositions(convolution, space), {"dp": 2, "tp": 2}, (x,))
    assert parallel.verify(x, promote=True).worst <= 1e-9 and parallel.verify(x)
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()


def test_what_tracing_wrote_on_nodes_is_dropped_where_nobody_reads_it() -> None:
    """Each program of a compile would copy it, and hold it: views of stacks, descriptors, whole traces of modules."""
    forms = compiled(Layer(lambda self, x: self.linear(x).tanh().square().sum()), {"dp": 2}, (X,)).compiled.forms
    read = {"val", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "ac_graph_id", "original_aten", "from_node"}
    for program in (joint_of(lambda self, x: self.linear(x).tanh().square().sum()), forms.program, forms.local):
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        assert calls and all(SOURCE[node].file for node in calls)
        assert {key for node in program.graph.nodes for key in node.meta if isinstance(key, str)} <= read
