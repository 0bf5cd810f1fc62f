"""Every way to call scaled_dot_product_attention, against torch's own: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.capture import capture
from autopar.graph.emit import tensor_of
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.attention import attention
from autopar.passes.forward.unify_attention import UnifyAttention

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten


class Attention(nn.Module):
    """Attention of three parameters, a batch of masks and constant options; `bias` is a learned mask."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Parameter(query), nn.Parameter(key), nn.Parameter(value)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.options = options

    def forward(self, mask: Tensor | None = None) -> Tensor:
        mask = self.bias if self.bias is not None else mask
        return F.scaled_dot_product_attention(self.query, self.key, self.value, mask, **self.options)


def unified(model: nn.Module, *inputs: Tensor, mesh: Mesh | None = None) -> Program:
    return UnifyAttention().apply(capture(model, inputs, {}, mesh or virtual_mesh(dp=1), outputs="all"))


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def assert_as_torch(model: nn.Module, *inputs: Tensor) -> Program:
    program = unified(model, *inputs)
    assert aten.scaled_dot_product_attention.default not in targets(program)
    parameters = list(model.parameters())
    by_name = dict(model.named_parameters())
    (got,) = program.module()(*(by_name[item.name] for item in program.signature.inputs_of("parameter")), *inputs)
    wanted = model(*inputs)
    assert got.shape == wanted.shape == program.results[0].meta["val"].shape
    assert got.stride() == program.results[0].meta["val"].stride()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    incoming = torch.randn_like(wanted)
    grads = zip(torch.autograd.grad(got, parameters, incoming), torch.autograd.grad(wanted, parameters, incoming), strict=True)
    for one, other in grads:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return program


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


FUSED: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([(2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)], {}),
    "causal, scaled": ([(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)], {"is_causal": True, "scale": 0.7}),
    "value size": ([(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)], {}),
    "grouped": ([(2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)], {"enable_gqa": True}),
    "one key head": ([(2, 6, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)], {}),
    "no heads": ([(4, 5, 8), (4, 7, 8), (4, 7, 8)], {}),
    "no batch": ([(5, 8), (7, 8), (7, 8)], {"is_causal": True}),
    "two batch dims": ([(2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8)], {}),
    "broadcast batch": ([(2, 4, 3, 5, 8), (1, 4, 3, 7, 8), (2, 1, 3, 7, 8)], {}),
}


@pytest.mark.parametrize("name", list(FUSED))
def test_one_op_in_its_place(name: str) -> None:
    shapes, options = FUSED[name]
    program = assert_as_torch(Attention(*tensors(*shapes), **options))
    assert targets(program).count(attention) == 1
    assert not any("matmul" in str(target) for target in targets(program))


@pytest.mark.parametrize(
    ("lead", "mask_shape"),
    [
        ((2, 3), (5, 7)),
        ((2, 3), (2, 1, 5, 7)),
        ((2, 3), (3, 1, 7)),
        ((4,), (4, 5, 7)),
        ((2, 4, 3), (2, 4, 1, 5, 7)),
        ((2, 4, 3), (4, 3, 5, 7)),
        ((2, 4, 3), (5, 7)),
    ],
    ids=str,
)
def test_masks(lead: tuple[int, ...], mask_shape: tuple[int, ...]) -> None:
    operands = tensors((*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 8))
    for mask in (torch.randn(mask_shape, dtype=torch.float64), (torch.rand(mask_shape) > 0.4).index_fill(-1, torch.tensor(0), True)):
        program = assert_as_torch(Attention(*operands), mask)
        assert targets(program).count(attention) == 1


def same(ids: Tensor) -> Tensor:
    return ids[..., :, None] == ids[..., None, :]


def triangle() -> Tensor:
    return torch.ones(6, 6, dtype=torch.bool).tril()


def written_later(ids: Tensor) -> Tensor:
    """Of ids that are others by the time attention reads its mask."""
    mask = same(ids := ids + 0)[:, None]
    ids.mul_(0)
    return mask


def prefix() -> Tensor:
    """The first two are seen by all."""
    mask = triangle()
    mask[:, :2].fill_(True)
    return mask


def prefix_beside(ids: Tensor) -> Tensor:
    mask = same(ids)[:, None]
    mask[..., :2].fill_(True)
    return mask & triangle()


def ids_partly_written(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[:, :3].fill_(7)
    return same(ids)[:, None] & triangle()


IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 3, 3, 3]])
# By name: leading dims of the operands, the mask made of IDS; what the op says: (documents, causal, window, whether a mask is left).
SAID: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], tuple[Any, ...]]] = {
    "triangle": ((2, 3), lambda ids: triangle(), (None, True, 0, False)),
    "triangle, added": ((2, 3), lambda ids: torch.zeros(6, 6).double().masked_fill(~triangle(), -torch.inf), (None, True, 0, False)),
    "band": ((2, 3), lambda ids: triangle().triu(-2), (None, True, 3, False)),
    "nothing masked": ((2, 3), lambda ids: torch.ones(6, 6, dtype=torch.bool), (None, False, 0, False)),
    "triangle of a tensor": ((2, 3), lambda ids: triangle() & (ids >= 0)[:, None, None], (None, False, 0, True)),
    "documents": ((2, 3), lambda ids: same(ids)[:, None] & triangle(), ((2, 6), True, 0, False)),
    "documents, added": ((2, 3), lambda ids: torch.where(same(ids)[:, None], 0.0, -torch.inf).double(), ((2, 6), False, 0, False)),
    "documents and padding": ((2, 3), lambda ids: (same(ids) & (ids != 2)[:, None])[:, None], ((2, 6), False, 0, True)),
    "documents for all samples": ((2, 3), lambda ids: same(ids[0]), ((1, 6), False, 0, False)),
    "documents, no heads": ((2,), lambda ids: same(ids) & triangle(), ((2, 6), True, 0, False)),
    "documents, two batch dims": ((2, 4, 3), lambda ids: same(ids)[:, None, None], ((8, 6), False, 0, False)),
    "documents by head": ((3, 2), lambda ids: same(ids), (None, False, 0, True)),
    "documents of floats": ((2, 3), lambda ids: same(ids * 0.5)[:, None], (None, False, 0, True)),
    "ids that are overwritten": ((2, 3), written_later, (None, False, 0, True)),
    "ids that are partly written": ((2, 3), ids_partly_written, (None, False, 0, True)),
    "written through a view": ((2, 3), lambda ids: prefix()[None, None], (None, False, 0, True)),
    "written through a view, and documents": ((2, 3), prefix_beside, (None, False, 0, True)),
}


@pytest.mark.parametrize("name", list(SAID))
def test_masks_are_flags_and_documents_where_they_say_the_same(name: str) -> None:
    lead, make, wanted = SAID[name]

    class Masked(Attention):
        def forward(self, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.query, self.key, self.value, make(mask))

    program = assert_as_torch(Masked(*tensors((*lead, 6, 8), (*lead, 6, 8), (*lead, 6, 8))), IDS)
    call = next(node for node in program.graph.nodes if node.target is attention)
    mask, *documents = call.args[3:6]
    shapes = {None if ids is None else tuple(ids.meta["val"].shape) for ids in documents}
    assert (shapes, call.kwargs["is_causal"], call.kwargs["window"], mask is not None) == ({wanted[0]}, *wanted[1:])


@pytest.mark.parametrize(("num_ranks", "flagged"), [(3, True), (4, False)])
def test_where_heads_are_fewer_than_ranks_a_mask_leaves_rows_to_be_split(num_ranks: int, flagged: bool) -> None:
    class Causal(Attention):
        def forward(self, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(self.query, self.key, self.value, triangle())

    program = unified(Causal(*tensors((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8))), mesh=virtual_mesh(dp=2, tp=num_ranks))
    call = next(node for node in program.graph.nodes if node.target is attention)
    assert call.kwargs["is_causal"] is flagged and (call.args[3] is None) is flagged


def _repeated(x: Tensor, repeats: int) -> Tensor:
    """As Hugging Face models spell it."""
    batch, groups, length, size = x.shape
    return x[:, :, None].expand(batch, groups, repeats, length, size).reshape(batch, groups * repeats, length, size)


REPEATS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "expand, reshape": (2, lambda x: _repeated(x, 3)),
    "repeat_interleave": (2, lambda x: x.repeat_interleave(3, dim=1)),
    "one key head, expanded": (1, lambda x: x.expand(2, 6, 7, 8)),
    "transposed, repeated, copied": (2, lambda x: _repeated(x.transpose(2, 3), 3).transpose(2, 3).contiguous()),
}


class RepeatedHeads(Attention):
    def __init__(self, repeat_key: Callable[[Tensor], Tensor], repeat_value: Callable[[Tensor], Tensor], groups: int) -> None:
        super().__init__(*tensors((2, 6, 5, 8), (2, groups, 7, 8), (2, groups, 7, 8)))
        self.repeat_key, self.repeat_value = repeat_key, repeat_value

    def forward(self, mask: Tensor | None = None) -> Tensor:
        key, value = self.repeat_key(self.key * 2.0), self.repeat_value(self.value * 2.0)
        return F.scaled_dot_product_attention(self.query, key, value, mask)


def _key_heads(program: Program) -> list[int]:
    (call,) = (node for node in program.graph.nodes if node.target is attention)
    return [tensor_of(operand).shape[1] for operand in call.args[1:3]]


@pytest.mark.parametrize("name", list(REPEATS))
@pytest.mark.parametrize("masked", [False, True])
def test_repeated_heads_are_read_as_groups(name: str, masked: bool) -> None:
    groups, repeat = REPEATS[name]
    mask = [torch.randn(5, 7, dtype=torch.float64)] if masked else []
    program = assert_as_torch(RepeatedHeads(repeat, repeat, groups), *mask)
    assert _key_heads(program) == [groups, groups]
    assert not {aten.expand.default, aten.repeat_interleave.self_int} & set(targets(program))


@pytest.mark.parametrize(
    ("repeat_key", "repeat_value"),
    [
        (lambda x: x.repeat(1, 3, 1, 1), lambda x: x.repeat(1, 3, 1, 1)),  # heads 0, 1, 0, 1, 0, 1: no equal runs
        (lambda x: _repeated(x, 3), lambda x: x.repeat(1, 3, 1, 1)),
        (lambda x: _repeated(x, 3), lambda x: _repeated(x, 3) + 1.0),
        (lambda x: (_repeated(x, 3), x.mul_(3.0))[0], lambda x: _repeated(x, 3)),  # the groups are no longer what was repeated
    ],
    ids=["other order", "two orders", "changed after it was repeated", "written since"],
)
def test_heads_that_are_no_equal_groups_stay_as_they_are(
    repeat_key: Callable[[Tensor], Tensor], repeat_value: Callable[[Tensor], Tensor]
) -> None:
    program = assert_as_torch(RepeatedHeads(repeat_key, repeat_value, 2))
    assert _key_heads(program) == [6, 6]


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}], ids=str)
def test_a_learned_mask_gets_its_gradient(options: dict[str, Any]) -> None:
    num_key_heads = 2 if options else 4
    operands = tensors((2, 4, 5, 8), (2, num_key_heads, 7, 8), (2, num_key_heads, 7, 8), (4, 5, 7))
    program = assert_as_torch(Attention(*operands, **options))
    assert attention not in targets(program)


def test_heads_that_groups_cannot_say_become_plain_ops() -> None:
    program = assert_as_torch(Attention(*tensors((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), is_causal=True))
    assert attention not in targets(program)


def test_a_mask_made_of_a_trained_value_by_comparison_is_a_constant() -> None:
    class Threshold(Attention):
        def forward(self, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.query, self.key, self.value, mask > self.query[0, 0, :1, :1])

    program = unified(Threshold(*tensors((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8))), torch.rand(5, 5, dtype=torch.float64))
    assert attention in targets(program)


def test_a_result_may_be_written_in_place() -> None:
    class Written(Attention):
        def forward(self) -> Tensor:
            return F.scaled_dot_product_attention(self.query, self.key, self.value).mul_(2.0)

    program = unified(Written(*tensors((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8))))
    values = [torch.randn(item.shape, dtype=item.dtype, requires_grad=item.requires_grad) for item in program.signature.inputs]
    (out,) = program.module()(*values)
    out.sum().backward()
    assert all(value.grad is not None for value in values if value.requires_grad)


def test_dropout_is_left_to_be_drawn() -> None:
    program = unified(Attention(*tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), dropout_p=0.25))
    call = next(node for node in program.graph.nodes if node.target is attention)
    assert call.args[6:] == (None, None, None)
    assert call.kwargs["keep_below"] == 3 * 2**30 and call.kwargs["keep_scale"] == 1 / 0.75
    parameters = [torch.ones(item.shape, dtype=item.dtype) for item in program.signature.inputs]
    with pytest.raises(ValueError, match="drop_rows"):
        program.module()(*parameters)


def test_a_view_of_the_result_fits_its_new_layout() -> None:
    class Merged(Attention):
        def forward(self, mask: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(self.query, self.key, self.value, mask)
            return out.contiguous().view(2, 15, 8)

    assert_as_torch(Merged(*tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))), torch.randn(5, 7, dtype=torch.float64))
