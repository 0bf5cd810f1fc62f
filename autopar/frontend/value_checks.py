"""Assertions on the values of tensors become outputs of the program, which the runtime reads after every run.

`asserts_assumed` lets a model's `assert` pass while fake tensors are run through it; the export keeps it as an `_assert_async` call, and
`checks_as_outputs` makes an output of that.
"""

from __future__ import annotations

import dis
import math
import operator
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, TorchDispatchMode
from autopar.graph.dead_code import remove_dead_code
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.emit import replace as replace_node
from autopar.ir.arguments import all_named, node_at
from autopar.ir.keys import SOURCE
from autopar.ir.program import Output, Program
from autopar.ir.source import is_torchs

aten = torch.ops.aten

ASSERTS = (aten._assert_async.msg, aten._assert_async.default)
# Solvers that raise for a matrix without a solution: each with the op that says so by a number, which is 0 for a good one.
_SOLVERS: dict[object, tuple[OpOverload, str]] = {
    aten.linalg_cholesky.default: (aten.linalg_cholesky_ex.default, "is not positive-definite"),
    aten.linalg_inv.default: (aten.linalg_inv_ex.default, "is singular"),
    aten.inverse.default: (aten.linalg_inv_ex.default, "is singular"),
    aten.linalg_solve.default: (aten.linalg_solve_ex.default, "is singular"),
}
_OLD_CHOLESKY: OpOverload | None = aten.cholesky.default if hasattr(aten, "cholesky") else None  # torch 2.15 has it no more
# Draws, the operand whose values torch checks, and what they must be.
_STDS = "std", "torch.normal: a standard deviation is negative or NaN"
_DRAWS: dict[object, tuple[str, str]] = {
    aten.multinomial.default: ("self", "torch.multinomial: a weight is negative, infinite or NaN, or all of a row are 0"),
    aten.normal.Tensor_Tensor: _STDS,
    aten.normal.float_Tensor: _STDS,
}
if _OLD_CHOLESKY is not None:
    _SOLVERS[_OLD_CHOLESKY] = _SOLVERS[aten.linalg_cholesky.default]


def checks_as_outputs(program: Program) -> Program:
    """Give a FORWARD program one more output for each assertion in it: how many values violate it.

    Reads: `_assert_async` calls, solvers that raise, and draws that check what they are given. Writes: outputs of kind "check", 0-d int64,
    and the text of each, with its line, in `signature.checks`; solvers that return their error instead of raising it. Ensures: no
    `_assert_async` is left.
    """
    for node in [node for node in program.graph.nodes if node.target in _SOLVERS]:
        _assert_solved(node)
    for node in program.graph.nodes:
        _assert_drawn(node)
    asserts = [node for node in program.graph.nodes if node.target in ASSERTS]
    if not asserts:
        return program
    counts = tuple(_violations(node, Emitter(program.graph, node)) for node in asserts)
    checks = tuple(f"{_text(node)}\n  where: {SOURCE[node].at}" for node in asserts)
    for node in asserts:
        program.graph.erase_node(node)
    end = program.graph.output_node()
    end.args = ((*program.results, *counts),)
    remove_dead_code(program.graph)
    outputs = tuple(Output("check", str(number), (), torch.int64) for number in range(len(checks)))
    signature = replace(program.signature, outputs=(*program.signature.outputs, *outputs), checks=checks)
    return replace(program, signature=signature)


def _text(node: Node) -> str:
    return str(node.args[1]) if node.target is aten._assert_async.msg else "an assertion on a tensor does not hold"


def _assert_solved(node: Node) -> None:
    """Call the solver that returns whether it has failed, and assert that it has not."""
    target, fault = _SOLVERS[node.target]
    emit = Emitter(node.graph, node)
    args, kwargs = node.args, dict(node.kwargs)
    if node.target is _OLD_CHOLESKY and len(args) > 1:  # its `upper` may be given by position
        args, kwargs = args[:1], {"upper": args[1]}
    solved = emit.call(target, *args, **kwargs)
    result, info = (emit.call(operator.getitem, solved, place) for place in (0, 1))
    message = f"{node.target}: a matrix {fault}"
    emit.call(
        aten._assert_async.msg, emit.call(aten.eq.Scalar, emit.call(aten.sum.default, emit.call(aten.ne.Scalar, info, 0)), 0), message
    )
    replace_node(node, result)


def _assert_drawn(node: Node) -> None:
    """Assert what torch checks of the values that a draw is made by."""
    if node.target not in _DRAWS:
        return
    emit, named = Emitter(node.graph, node), all_named(node)
    name, message = _DRAWS[node.target]
    given = named[name]
    wrong = emit.call(aten.logical_not.default, emit.call(aten.ge.Scalar, given, 0))  # NaN is
    if node.target is aten.multinomial.default:
        wrong = emit.call(aten.logical_or.default, wrong, emit.call(aten.eq.Scalar, given, math.inf))
        empty = emit.call(aten.eq.Scalar, emit.call(aten.sum.dim_IntList, given, [-1], True), 0)
        wrong = emit.call(aten.logical_or.default, wrong, empty)
    count = emit.call(aten.sum.default, wrong)
    emit.call(aten._assert_async.msg, emit.call(aten.eq.Scalar, count, 0), message)


def _violations(node: Node, emit: Emitter) -> Node:
    """How many values violate an assertion. `all` and `any` would gather what they read; a sum is counted where the values are."""
    condition = node_at(node, 0)
    if condition.target is aten.eq.Scalar and condition.args[1] == 0 and not tensor_of(condition.args[0]).is_floating_point():
        return node_at(condition, 0)  # a count already
    if condition.target in (aten.all.default, aten._is_all_true.default):
        violated = emit.call(aten.logical_not.default, condition.args[0])
    else:
        violated = emit.call(aten.logical_not.default, condition)
    return emit.call(aten.sum.default, violated)


@contextmanager
def asserts_assumed() -> Generator[None]:
    """While this is entered, an `assert` on a tensor without values passes; reading its value for anything else is refused as before."""
    with _AssumeAsserts():
        yield


class _AssumeAsserts(TorchDispatchMode):
    """Where a bool is read from a fake tensor, look in the caller's bytecode whether it is for an `assert`: torch itself cannot tell."""

    supports_higher_order_operators = True  # they are refused by name where they reach the graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # the most frequent of all: asked on it takes longer
        if func is aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            wanted = next((found for found in map(_asserted, _callers(sys._getframe(1))) if found is not None), None)
            if wanted is not None:
                return wanted
        return func(*args, **(kwargs or {}))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and those that called it, up to the innermost one outside of torch."""
    while frame is not None:
        yield frame
        frame = frame.f_back if is_torchs(frame.f_code.co_filename) or frame.f_code.co_filename == __file__ else None


def _asserted(frame: FrameType) -> bool | None:
    """The truth value with which the `assert` that `frame` now evaluates would pass; None if it evaluates something else."""
    following = [each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti]
    jump = next((place for place, each in enumerate(following) if each.opname.startswith("POP_JUMP")), len(following))
    # LOAD_ASSERTION_ERROR; from Python 3.14 on LOAD_COMMON_CONSTANT (AssertionError).
    if not any("ASSERTION_ERROR" in each.opname or each.argrepr == "AssertionError" for each in following[jump + 1 : jump + 2]):
        return None
    return not following[jump].opname.endswith("IF_FALSE")  # `assert not x` jumps there
