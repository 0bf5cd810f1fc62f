"""Passes run in order; observers see every step; errors say where they happened."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from torch.fx import Graph

from autopar._torch import fake_mode
from autopar.checks.checker import Checker
from autopar.driver.compiled import PassRun
from autopar.driver.manager import DecidingPass, History, Log, Pass, run_passes
from autopar.errors import AutoparError, CheckError
from autopar.graph.emit import Emitter
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Input, Output, Program, Signature

aten = torch.ops.aten


def program() -> Program:
    graph = Graph()
    x = graph.placeholder("x")
    with fake_mode():
        x.meta["val"] = torch.empty(8, 16)
    output = graph.output(())
    output.args = ((Emitter(graph, output).call(aten.relu.default, x),),)
    signature = Signature((Input("batch", "0", (8, 16), torch.float32),), (Output("output", "0", (8, 16), torch.float32),))
    return Program(graph, Mesh((("dp", 2),)), signature, Form.GLOBAL)


@dataclass(frozen=True)
class Twice:
    """Put one more op in front of the output."""

    name: str = "twice"
    target: object = aten.neg.default

    def apply(self, program: Program) -> Program:
        program = program.copy()
        end = program.graph.output_node()
        end.args = ((Emitter(program.graph, end).call(self.target, program.results[0]),),)  # type: ignore[arg-type]
        return program


@dataclass(frozen=True)
class Copies:
    """Look for something that is not there."""

    name: str = "copies"

    def apply(self, program: Program) -> Program:
        return program.copy()


@dataclass(frozen=True)
class Many:
    """Decide how many ops to add."""

    name: str = "many"

    def decide(self, program: Program) -> int:
        return program.num_nodes + 2

    def apply(self, program: Program, decision: int) -> Program:
        for _ in range(decision):
            program = Twice().apply(program)
        return program


@dataclass(frozen=True)
class Broken:
    name: str = "broken"

    def apply(self, program: Program) -> Program:
        raise RuntimeError("no such node")


@dataclass(frozen=True)
class Lies:
    """Claim a wrong shape."""

    name: str = "lies"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        with fake_mode():
            program.results[0].meta["val"] = torch.empty(8, 17)
        return program


def test_passes_run_in_order_and_leave_the_given_program_alone() -> None:
    given = program()
    result = run_passes(given, (Twice(), Many()))
    assert given.num_nodes == 1
    assert result.num_nodes == 2 + 4


def test_an_untouched_copy_counts_as_the_given_program() -> None:
    history = History()
    given = program()
    run_passes(given, (Copies(), Twice(), Copies()), (history,))
    first, second, third, fourth = (step.program for step in history.graph_steps)
    assert second is first is given and fourth is third is not second


def test_history_keeps_programs_and_decisions() -> None:
    history = History()
    run_passes(program(), (Twice(), Many()), (history,))
    assert [(step.number, step.name, step.decision, step.program.num_nodes) for step in history.graph_steps] == [
        (0, "capture", None, 1),
        (1, "twice", None, 2),
        (2, "many", 4, 6),
    ]
    assert all(step.seconds >= 0 for step in history.graph_steps)


def test_history_finds_steps_by_pass() -> None:
    history = History()
    run_passes(program(), (Twice(), Many(), Twice("again")), (history,))
    assert history.program(Twice).num_nodes == 7
    assert history.program("twice").num_nodes == 2
    assert history.decision(Many) == 4
    assert history.step("again").number == 3
    with pytest.raises(AutoparError, match="no pass 'Lies' ran; these did: capture, twice, many, again"):
        history.program(Lies)


def test_observers_see_the_captured_program() -> None:
    with pytest.raises(CheckError, match="as captured: 2 violations"):
        run_passes(Lies().apply(program()), (Twice(),), (Checker(),))


def test_protocols_tell_the_two_kinds_of_pass_apart() -> None:
    assert isinstance(Twice(), Pass) and not isinstance(Twice(), DecidingPass)
    assert isinstance(Many(), DecidingPass)


def test_log_has_one_line_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    run_passes(program(), (Twice(), Many()), (Log(),), seconds=1.5)
    _, first, second = (record.getMessage().split() for record in caplog.records)
    assert first[:2] == ["1", "twice"] and first[-4:] == ["1", "→", "2", "nodes"]
    assert second[:2] == ["2", "many"] and second[-4:] == ["2", "→", "6", "nodes"]
    assert {record.name for record in caplog.records} == {"autopar"}


def test_errors_bear_the_pass_that_raised_them() -> None:
    with pytest.raises(RuntimeError, match="no such node") as caught:
        run_passes(program(), (Twice(), Broken()))
    assert caught.value.__notes__ == ["in pass 2, broken (Broken)"]


def test_a_refused_program_is_attached_and_the_pass_named() -> None:
    with pytest.raises(CheckError, match="after pass 2, lies: 2 violations") as caught:
        run_passes(program(), (Twice(), Lies()), (Checker(),))
    printed, place = caught.value.__notes__
    assert "aten.neg" in printed and "f32[8, 17]" in printed
    assert place == "in pass 2, lies (Lies)"


def test_observers_are_called_in_order_after_each_pass() -> None:
    seen: list[tuple[str, int]] = []

    def observer(name: str) -> object:
        def observe(step: PassRun) -> None:
            seen.append((name, step.number))

        return observe

    run_passes(program(), (Twice(), Twice()), (observer("a"), observer("b")))  # type: ignore[arg-type]
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
