"""A program that went through a file is the same program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.printing import print_program
from autopar.ir.program import Program
from autopar.passes.global_.trace_joint import trace_joint
from tests.support.models.zoo import gpt2
from tests.support.programs import FORWARD_PASSES
from tests.support.stored import FOLDER, content_of, described, dumped, loaded, stored

MESH = virtual_mesh(dp=2)


def test_what_is_loaded_is_what_was_dumped_and_traces_alike() -> None:
    case = gpt2()
    program = run_passes(capture(case.model, (), case.batch, MESH), FORWARD_PASSES)
    again = loaded(dumped(program))
    assert content_of(again) == content_of(program) and print_program(again) == print_program(program)
    joint, joint_again = (trace_joint(each, training=True) for each in (program, again))
    assert print_program(loaded(dumped(joint))) == print_program(joint_again)


def test_the_content_has_shapes_and_literals() -> None:
    class Layer(nn.Module):
        def __init__(self, width: int, factor: float) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(width, width), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).clone(memory_format=torch.contiguous_format).sum() * self.factor

    programs = [capture(Layer(width, factor), (torch.randn(8, width),), {}, MESH) for width, factor in ((4, 1.0), (6, 1.0), (4, 2.0))]
    assert len({content_of(each) for each in programs}) == 3
    assert all(content_of(loaded(dumped(each))) == content_of(each) for each in programs)


def test_a_key_is_made_once_for_all_and_what_has_an_address_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made: list[Program] = []

    def make() -> Program:
        made.append(capture(nn.Linear(4, 4), (torch.randn(8, 4),), {}, MESH, outputs="all"))
        return made[-1]

    assert print_program(stored(("linear", 4), make)) == print_program(stored(("linear", 4), make)) and len(made) == 1

    class Local(nn.Module):
        pass

    assert "module.py:torch.nn.modules.module.Module" in described(nn.Module) and " at 0x" in described(Local)
    for _ in range(2):
        stored((Local, 4), make)
    assert len(made) == 3
