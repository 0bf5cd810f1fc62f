"""What `why` tells of a compiled model: costs, values on their way, runners-up. (On a program made by hand: test_inspect.py.)"""

from __future__ import annotations

import re

import pytest

from autopar.errors import AutoparError
from autopar.ir.units import in_bytes, in_seconds
from autopar.reports.summary import contractions, cost_of, seconds_of
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import BATCH, LENGTH, WIDTH, parallel_residual, piped, tied_pipe

MEGATRON = {"blocks.*.mlp.up.weight": ("tp", None), "blocks.*.mlp.down.weight": (None, "tp"), "blocks.*.mlp": (None, "tp", ...)}


@pytest.fixture(scope="module")
def parallel() -> ParallelModule:
    return parallel_residual(cluster="8xh100", pins=MEGATRON, memory_budget="1GB")


def section(text: str, start: str) -> list[str]:
    """The row that starts so, with its notes."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    last = next((number for number in range(first + 1, len(lines)) if not lines[number].startswith("    ")), len(lines))
    return [line.strip() for line in lines[first:last]]


def test_a_product_is_told_with_its_split_costs_reshards_and_runner_up(parallel: ParallelModule) -> None:
    row = section(parallel.why("blocks.1.mlp.down"), "blocks.1.mlp.down forward aten.mm")
    assert row[0].endswith(" sum@tp   dp:m.0 tp:k")
    assert re.match(r"takes .*: compute .*, memory traffic and launch .*; split over 4 of 4 ranks", row[1])
    local = BATCH // 2 * LENGTH * WIDTH * 8 / 2
    assert any(line.startswith(f"result: reduce_scatter over tp, {in_bytes(local)}, ") for line in row), row
    assert any(re.fullmatch(r"\d+ strategies considered.*", line) for line in row)
    assert re.fullmatch(r"instead: dp:m.0( tp:\S+)? \+\S+ \S+ a step( \(all 2 alike\))?", row[-1])


def test_a_parameter_is_told_with_what_it_holds(parallel: ParallelModule) -> None:
    text = parallel.why("blocks.1.mlp.down.weight")
    local = 4 * WIDTH * WIDTH * 8 // 2
    row = section(text, "blocks.1.mlp.down.weight")
    # Gradient and Adam's two moments, in float64 as the parameter, and the step count.
    assert row[1].startswith(f"holds {in_bytes(local)} a rank, {in_bytes(4 * local + 4)} with its gradient and optimizer state; its update")
    assert any(line.startswith("gradient: all_reduce over dp, ") and line.endswith("(backward)") for line in row)
    assert row[-1] == "pinned by the user"
    assert "search: holds " in text and "of memory_budget=1.0 GB" in text and "dropped: " in text


def test_totals_of_a_module_add_up(parallel: ParallelModule) -> None:
    text = parallel.why("aten.mm")
    program, cost = parallel.compiled.program, cost_of(parallel.compiled)
    products = list(contractions(program))
    compute, traffic = (sum(times) for times in zip(*(seconds_of(node, cost) for node in products), strict=True))
    head = (
        f"{len(products)} ops: compute {in_seconds(compute)}, memory traffic and launches {in_seconds(traffic)}, communication in and out "
    )
    assert f"\n{head}" in text


def test_ops_that_are_no_contraction_are_told_shortly(parallel: ParallelModule) -> None:
    row = section(parallel.why("blocks.0.norm"), "blocks.0.norm forward autopar.norm")
    assert " → " in row[0] and row[0].endswith("s") and row[-1].startswith("instead: ")


def test_a_pinned_output_says_so(parallel: ParallelModule) -> None:
    row = section(parallel.why("blocks.0.mlp"), "blocks.0.mlp forward pinned")
    assert row[0] == "blocks.0.mlp forward pinned → [4@dp, 8@tp, 16]   dp:a0 tp:a1" and row[-1] == "pinned by the user"
    assert "what modules return, pinned by the user\n  blocks.*.mlp [4@dp, 8@tp, 16]   × 2\n" in parallel.explain(detail="all")


def test_no_match_lists_what_is_near(parallel: ParallelModule) -> None:
    with pytest.raises(AutoparError, match="'blocks.1.mlp.dwn' matches no parameter, and no module or op that computes; ") as caught:
        parallel.why("blocks.1.mlp.dwn")
    assert "there are blocks.1.mlp.down.bias, blocks.1.mlp.down.weight, " in str(caught.value)
    assert "; and blocks.1.mlp.down, " in str(caught.value)


def test_the_stage_of_an_op_and_the_stages_of_a_parameter_are_named() -> None:
    text = tied_pipe().why("table")
    assert section(text, "table.weight")[1] == "held by stages 0, 1, each for itself"
    assert section(text, "table forward aten.embedding")[1] == "runs on stage 0"
    last = section(tied_pipe().why("head"), "head forward aten.mm")
    assert last[1] == "runs on stage 1" and last[2].endswith("; split over 2 of 2 ranks, in 2 microbatches")
    assert "seconds and bytes are of one microbatch of 2, those of gradients and updates of a step" in text


def test_without_a_pipeline_no_stage_is_named(parallel: ParallelModule) -> None:
    assert "stage" not in parallel.why("table") and "microbatch" not in parallel.why("table")


def test_prices_of_several_microbatches_are_those_of_one() -> None:
    text = piped(pp=1, tp=2).why("blocks.1.mlp.down")
    assert " a microbatch" in text and " a step (" not in text and "runs on" not in text
