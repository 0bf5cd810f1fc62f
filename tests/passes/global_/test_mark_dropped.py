"""What will be computed again is marked before the search."""

from __future__ import annotations

from autopar.ir.keys import DROPPED, REPEATABLE, SOURCE
from autopar.ir.markers import save
from autopar.ir.program import Program
from autopar.passes.global_.mark_dropped import MarkDropped
from tests.support.models.residual import parallel_residual


def marked(mode: str) -> tuple[set[str], set[str]]:
    """The modules of what is saved that is marked, and that is not."""
    parallel = parallel_residual()
    program = next(step.program for step in parallel.compiled.steps if step.name == "pad atoms")
    after = MarkDropped(mode).apply(program)
    assert isinstance(after, Program)
    saved = [node for node in after.graph.nodes if node.target is save]
    return {SOURCE[node].module for node in saved if node in DROPPED}, {SOURCE[node].module for node in saved if node not in DROPPED}


def test_what_layers_make_for_themselves_is_marked() -> None:
    dropped, kept = marked("full")
    assert {module.partition(".")[0] for module in dropped} == {"blocks"} and any("mlp" in module for module in dropped)
    assert not any("mlp" in module for module in kept)


def test_nothing_is_marked_that_nobody_asked_for() -> None:
    assert marked("auto")[0] == marked("none")[0] == set()


def test_what_a_budget_may_drop_is_marked_with_its_price() -> None:
    """Each call that is done again is paid for by one value, and what is made for others is kept."""
    parallel = parallel_residual()
    program = next(step.program for step in parallel.compiled.steps if step.name == "pad atoms")
    after = MarkDropped("auto", may_choose=True).apply(program)
    prices = {node: REPEATABLE[node] for node in after.graph.nodes if node in REPEATABLE}
    assert {SOURCE[node].module for node in prices} == marked("full")[0]
    paid = [name for names in prices.values() for name in names]
    assert paid and len(paid) == len(set(paid)) and set(paid) <= {node.name for node in after.graph.nodes}
