"""The check of LOCAL programs: shapes against shardings, collectives against what is unreduced. One refusal test for each message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar._torch import fake_mode
from autopar.checks.checker import Checker
from autopar.driver.compiled import PassRun
from autopar.errors import CheckError
from autopar.graph.emit import Emitter
from autopar.ir.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, wait
from autopar.ir.keys import DIMS, ORIGIN, SHARDING
from autopar.ir.program import Program
from tests.support.faults.programs import local, messages, sharded

aten = torch.ops.aten


def _local_shape_off_by_one(program: Program) -> None:
    with fake_mode():
        program.node("relu").meta["val"] = torch.empty(4, 5)


def _unknown_axis(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("ep",), "sum")


def _wrong_axis(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("dp",), "sum")


def _wrong_kind(program: Program) -> None:
    node = program.node("launch")
    node.args = (node.args[0], ("tp",), "max")


def _doubled(program: Program) -> None:
    emit = Emitter(program.graph, program.node("relu"))
    again = emit.call(wait, emit.call(all_reduce, program.node("whole"), ("tp",), "sum"))
    whole = program.node("whole")
    for key in (ORIGIN, DIMS, SHARDING):
        again.meta[key] = whole.meta.pop(key)
    program.node("relu").args = (again,)


def _dropped(program: Program) -> None:
    program.node("relu").args = (program.node("product"),)
    program.graph.erase_node(program.node("whole"))
    program.graph.erase_node(program.node("launch"))


def _replaced_by_a_copy(program: Program) -> None:
    whole = program.node("whole")
    emit = Emitter(program.graph, program.node("relu"))
    copy = emit.call(aten.clone.default, program.node("product"))
    for key in (ORIGIN, DIMS, SHARDING):
        copy.meta[key] = whole.meta.pop(key)
    whole.replace_all_uses_with(copy)
    program.graph.erase_node(whole)
    program.graph.erase_node(program.node("launch"))


def _bypassed(program: Program) -> None:
    program.node("relu").args = (program.node("product"),)


def _no_wait(program: Program) -> None:
    program.node("relu").args = (program.node("launch"),)


def _two_waits(program: Program) -> None:
    Emitter(program.graph, program.node("relu")).call(wait, program.node("launch"))


def _wait_for_nothing(program: Program) -> None:
    program.node("whole").args = (program.node("product"),)


def _stray_launch(program: Program) -> None:
    emit = Emitter(program.graph, program.node("relu"))
    program.node("relu").args = (emit.call(wait, emit.call(all_reduce, program.node("whole"), ("tp",), "sum")),)


def _strange_origin(program: Program) -> None:
    ORIGIN[program.node("relu")] = "gelu"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_local_shape_off_by_one, "the local shape is not this rank's part of [8@dp, 4]"),
        (_unknown_axis, "all_reduce over the unknown axis 'ep'"),
        (_wrong_axis, "all_reduce over dp, over which its operand is not unreduced: a doubled reduction, or the wrong axis"),
        (_wrong_axis, "a reduction was dropped: the value is still unreduced over tp"),
        (_wrong_kind, "all_reduce over tp reduces by the wrong kind"),
        (_doubled, "all_reduce over tp, over which its operand is not unreduced: a doubled reduction"),
        (_dropped, "a reshard has no part in the LOCAL program: its collective was dropped"),
        (_replaced_by_a_copy, "a reduction was dropped: the value is still unreduced over tp"),
        (_bypassed, "what %relu became reads a value that %relu does not read"),
        (_no_wait, "the result of a launch is used before its wait"),
        (_two_waits, "a launch needs exactly one wait"),
        (_wait_for_nothing, "wait for what was never launched"),
        (_stray_launch, "all_reduce where the origin %relu changes no sharding"),
        (_strange_origin, "the node's origin 'gelu' is not in the GLOBAL program"),
    ],
)
def test_refuses_a_local_program(damage: Callable[[Program], None], expected: str) -> None:
    program = local()
    damage(program)
    assert expected in messages(program, sharded())


def test_refuses_collectives_on_values_that_are_not_laid_out_for_them() -> None:
    for launch, arguments, expected in (
        (reduce_scatter, (("tp",), "sum"), "reduce_scatter wants one entry per rank first"),
        (all_to_all, (("tp",),), "all_to_all wants one entry per rank first"),
        (all_gather, (("tp",), 4), "all_gather over tp gathers from the wrong number of ranks"),
    ):
        program = local()
        emit = Emitter(program.graph, program.graph.output_node())
        emit.call(wait, emit.call(launch, program.node("relu"), *arguments))
        assert expected in messages(program)


def test_refuses_moving_partial_sums() -> None:
    program = local()
    node = program.node("launch")
    with program.graph.inserting_before(node):
        gather = program.graph.call_function(all_gather, (node.args[0], ("tp",), 2))
    with fake_mode():
        gather.meta["val"] = torch.empty(2, 4, 4)
    emit = Emitter(program.graph, program.node("relu"))
    first = emit.call(aten.select.int, emit.call(wait, gather), 0, 0)
    whole = program.node("whole")
    for key in (ORIGIN, DIMS, SHARDING):
        first.meta[key] = whole.meta.pop(key)
    program.node("relu").args = (first,)
    assert "all_gather over tp, over which its operand is unreduced" in messages(program, sharded())


def test_checker_compares_local_with_the_last_global_program() -> None:
    checker = Checker()
    checker(PassRun(1, "insert reshards", 0.0, sharded()))
    broken = local()
    _bypassed(broken)
    with pytest.raises(CheckError, match="after pass 2, lower"):
        checker(PassRun(2, "lower", 0.0, broken))
