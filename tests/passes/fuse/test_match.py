"""A decision carries what was matched: it is written into a copy, as often as one likes, and later forms read what stands for earlier."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from autopar.frontend.capture import capture
from autopar.ir.fusion import FusionDecision, FusionSite, NotFusible
from autopar.ir.printing import print_program
from autopar.ir.program import Program
from autopar.kernels.gated import gated
from autopar.kernels.normalisation import norm
from autopar.passes.forward.fuse_gates import FuseGates
from autopar.passes.forward.fuse_norms import FuseNorms
from autopar.passes.fuse.match import Rewriting, first_match, rewritten, site_at
from tests.support.forms.suite import MESH, targets


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self) -> Tensor:
        return rms_norm(rms_norm(torch.stack([self.weight, 2 * self.weight]), (8,), self.weight), (8,), self.weight)


@pytest.fixture(scope="module")
def two_norms() -> tuple[Program, FusionDecision]:
    program = capture(TwoNorms(), (), {}, MESH, outputs="all")
    return program, FuseNorms().decide(program)


def test_a_form_reads_what_stands_for_the_form_above_it(two_norms: tuple[Program, FusionDecision]) -> None:
    program, decision = two_norms
    first, second = (node for node in FuseNorms().apply(program, decision).graph.nodes if node.target is norm)
    operand = second.args[0]
    assert operand.target is operator.getitem and operand.args == (first, 0)


def test_a_decision_is_applied_twice_with_one_result_and_leaves_its_program(two_norms: tuple[Program, FusionDecision]) -> None:
    program, decision = two_norms
    before = print_program(program)
    first, second = (print_program(FuseNorms().apply(program, decision)) for _ in range(2))
    assert first == second != before == print_program(program)


def test_a_match_is_no_part_of_what_a_site_says(two_norms: tuple[Program, FusionDecision]) -> None:
    site = two_norms[1].found[0]
    plain = FusionSite(site.what, site.node, site.source, site.conditions)
    assert site.match is not None and plain.match is None and site == plain and repr(site) == repr(plain)


def test_a_match_of_a_copy_has_the_copys_nodes_in_all_its_parts(two_norms: tuple[Program, FusionDecision]) -> None:
    program, decision = two_norms
    rewriting, found = Rewriting(program), decision.found[1].match
    here = rewriting.here(found)
    nodes = set(rewriting.program.graph.nodes)
    assert {here.root, here.x, here.weight, *here.interior} <= nodes and here.x.name == found.x.name and here.eps == found.eps


def test_where_nothing_is_found_the_program_is_the_one_that_was_given(two_norms: tuple[Program, FusionDecision]) -> None:
    program, _ = two_norms
    assert rewritten(program, ()) is program
    assert all(site_at(node, "norm", lambda _: None) is None for node in program.graph.nodes)


def test_a_gate_that_is_gated_is_two() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(2, 8)) for _ in range(3)])

        def forward(self) -> Tensor:
            gate, first, second = (weight.asinh() for weight in self.weights)
            return silu(silu(gate) * first) * second

    program = capture(Gates(), (), {}, MESH, outputs="all")
    decision = FuseGates().decide(program)
    assert len(decision.fused) == 2 and targets(FuseGates().apply(program, decision)).count(gated) == 2


def test_the_first_form_wins_and_the_first_reason_where_there_is_none() -> None:
    def match(reading: int) -> str | None:
        if reading < 0:
            raise NotFusible(f"{reading} is below zero")
        return f"{reading}" if reading else None

    assert first_match((-1, 0, 3, 4), match) == "3" and first_match((0, 0), match) is None
    with pytest.raises(NotFusible, match="-1 is below zero"):
        first_match((0, -1, -2), match)
