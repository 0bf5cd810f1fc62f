"""Copies of programs, and what tells one from its original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autopar.ir.freedom import Freedom
from autopar.ir.keys import DIMS, PHASE
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from tests.support.graphs import find, traced

aten = torch.ops.aten


@pytest.fixture(scope="module")
def program() -> Program:
    return traced(lambda x: (x + 0.0).relu(), torch.randn(4, 4))


def test_a_copy_is_a_copy_until_it_is_changed(program: Program) -> None:
    assert program.copy().is_copy_of(program) and program.is_copy_of(program)


def _literal(program: Program) -> Program:
    (add,) = find(program, aten.add.Tensor)
    add.args = (add.args[0], -0.0)  # equal to 0.0, and another number
    return program


def _operand(program: Program) -> Program:
    (relu,) = find(program, aten.relu.default)
    relu.args = program.placeholders
    return program


def _target(program: Program) -> Program:
    (relu,) = find(program, aten.relu.default)
    relu.target = aten.neg.default
    return program


def _keyed(program: Program) -> Program:
    DIMS[program.placeholders[0]] = ((),)
    return program


def _rekeyed(program: Program) -> Program:
    (relu,) = find(program, aten.relu.default)
    PHASE[relu] = "backward"
    return program


def _without(program: Program) -> Program:
    program.graph.output_node().args = (tuple(program.placeholders),)
    program.graph.eliminate_dead_code()
    return program


CHANGES: list[Callable[[Program], Program]] = [
    _literal,
    _operand,
    _target,
    _keyed,
    _rekeyed,
    _without,
    lambda program: replace(program, mesh=Mesh((("dp", 3),))),
    lambda program: replace(program, freedom=Freedom(batch=("tp",))),
    lambda program: replace(program, signature=replace(program.signature, checks=("x > 0",))),
    lambda program: replace(program, constants={"one": torch.ones(1)}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_tells(program: Program, change: Callable[[Program], Program]) -> None:
    assert not change(program.copy()).is_copy_of(program)
