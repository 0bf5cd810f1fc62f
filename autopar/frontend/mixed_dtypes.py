"""Refuses operands of dtypes that no kernel takes together (float32 times bfloat16): fake tensors let many pass, real ones would fail."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from autopar._torch import OpOverload, pytree
from autopar.errors import CaptureError, InputError
from autopar.graph.overwrites import sources_of
from autopar.ir.arguments import call_of
from autopar.ir.keys import Source
from autopar.ir.program import Program
from autopar.ir.source import user_frames

MAX_ELEMENTS = 1 << 20  # of an operand; an op is tried on real tensors up to there
# einsum is none of them: where it adds nothing up it takes any, and where it does, torch itself refuses to trace it.
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "bilinear"})


def refuse_mixed_dtypes(program: Program, given: Mapping[Node, str]) -> None:
    """Raise `InputError` where an input's dtype meets another one in an op that takes one dtype, as plain torch does; without such
    an input it is a `CaptureError`. `program` is FORWARD, `given` are its batch inputs with the user's names."""
    usual = {item.dtype for item in program.signature.inputs if item.kind != "batch"}
    for node in program.graph.nodes:
        dtypes = {value.dtype for value in _values(node)}
        if node.op == "call_function" and len(dtypes) > 1 and _is_refused(node, dtypes):
            odd = [each for each in sorted(sources_of([node])) if each in given and each.meta["val"].dtype in dtypes - usual]
            raise _refusal(node, dtypes, {given[each]: each.meta["val"].dtype for each in odd}, usual)


def _values(node: Node) -> list[torch.Tensor]:
    values = (operand.meta.get("val") for operand in node.all_input_nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_refused(node: Node, dtypes: Collection[torch.dtype]) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise in target.tags:
        return False
    if target.overloadpacket.__name__ in _PRODUCTS:
        return True
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floats) < 2 or max(value.numel() for value in _values(node)) > MAX_ELEMENTS:
        return False
    return not _runs(node, None) and _runs(node, functools.reduce(torch.promote_types, floats))


def _runs(node: Node, dtype: torch.dtype | None) -> bool:
    """Whether the op takes zeros of its operands' shapes, in their dtypes or all floats in one."""

    def zeros(operand: Node) -> Any:
        def zero(value: torch.Tensor) -> torch.Tensor:
            return torch.zeros(value.shape, dtype=dtype if dtype is not None and value.is_floating_point() else value.dtype)

        return pytree.tree_map_only(torch.Tensor, zero, operand.meta["val"])

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            call_of(node)(*map_arg(node.args, zeros), **map_arg(node.kwargs, zeros))
        except RuntimeError:
            return False
    return True


def _refusal(node: Node, dtypes: Collection[torch.dtype], odd: Mapping[str, torch.dtype], usual: Collection[torch.dtype]) -> Exception:
    frames = user_frames(node.meta.get("stack_trace") or "")
    where = (frames[-1] if frames else Source()).at
    assert isinstance(node.target, OpOverload)
    op = node.target.overloadpacket.__name__
    what = f"{op} takes operands of one dtype, and here they are {' and '.join(sorted(map(_name, dtypes)))}\n  where: {where}"
    if not odd:
        return CaptureError(f"{what}\n  how to mend it: cast one of them, as plain torch asks for, too")
    theirs = " and ".join(sorted(_name(dtype) for dtype in set(dtypes) & set(usual))) or "others"
    casts = "; ".join(f"{name!r} is {_name(dtype)}, the model's tensors there are {theirs}" for name, dtype in odd.items())
    return InputError(f"{what}\n  how to mend it: {casts}: pass {next(iter(odd))}.to(torch.{theirs.split(' and ')[0]}), or cast the model")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
