"""What explain, summary, why, print_program and diff say of a small compiled program, checked against sums done by hand."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph

import autopar
from autopar._torch import fake_mode
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.compiled import Compiled, PassRun
from autopar.errors import AutoparError
from autopar.graph.emit import Emitter
from autopar.ir.collectives import reshard
from autopar.ir.instructions import parse
from autopar.ir.keys import DIMS, PHASE, SHARDING, SOURCE, STRATEGY, Source
from autopar.ir.markers import save
from autopar.ir.mesh import Mesh
from autopar.ir.pattern import folded, pattern_of
from autopar.ir.program import Form, Input, Output, Program, Signature
from autopar.ir.schedule import Schedule
from autopar.ir.sharding import Sharding, Strategy
from autopar.ir.units import in_bytes, in_seconds
from autopar.partition.solver.assignment import AssignmentNode, Candidate, Problem
from autopar.partition.solver.search import search
from autopar.plans.decisions import ShardingDecision
from autopar.plans.plan import Plan
from autopar.reports.explain import indivisible
from autopar.reports.inspect import diff, explain, print_program, print_schedule, summary, why
from tests.support import captures
from tests.support.models import zoo
from tests.support.models.residual import plain_pipe
from tests.support.schedules import buffers_of, whole

aten = torch.ops.aten
MESH = Mesh((("dp", 2), ("tp", 2)))
X, ROW, COLUMN = Sharding((("dp",), ())), Sharding((("tp",), ())), Sharding(((), ("tp",)))
WIDE, PARTIAL = Sharding((("dp",), ("tp",))), Sharding((("dp",), ()), (("tp", "sum"),))
LOSS, TOTAL = Sharding(()), Sharding((), (("dp", "sum"),))
LAYERS = 3


def program() -> Program:
    """Three layers x + relu(x @ up) @ down of width 6 and inner width 10, split as Megatron does, and a sum of a 7-wide table."""
    graph = Graph()
    x = graph.placeholder("x")
    weights = [(graph.placeholder(f"up_{i}"), graph.placeholder(f"down_{i}")) for i in range(LAYERS)]
    table = graph.placeholder("table")
    with fake_mode():
        x.meta["val"], table.meta["val"] = torch.empty(8, 6), torch.empty(7, 3)
        for up, down in weights:
            up.meta["val"], down.meta["val"] = torch.empty(6, 10), torch.empty(10, 6)
    output = graph.output(())
    emit = Emitter(graph, output)
    shardings = {x: X, table: Sharding(((), ()))}
    strategies: dict[object, Strategy] = {}
    value = x
    for index, (up, down) in enumerate(weights):
        wide = emit.call(aten.mm.default, value, up)
        relu = emit.call(aten.relu.default, wide)
        partial = emit.call(aten.mm.default, relu, down)
        whole = emit.call(reshard, partial, X)
        value = emit.call(aten.add.Tensor, value, whole)
        shardings |= {up: COLUMN, down: ROW, wide: WIDE, relu: WIDE, partial: PARTIAL, whole: X, value: X}
        strategies[wide] = Strategy((X, COLUMN), (WIDE,), (("dp", "m"), ("tp", "n")), 4)
        strategies[relu] = Strategy((WIDE,), (WIDE,), (("dp", "d0"), ("tp", "d1")), 4)
        strategies[partial] = Strategy((WIDE, ROW), (PARTIAL,), (("dp", "m"), ("tp", "k")), 4)
        strategies[value] = Strategy((X, X), (X,), (("dp", "d0"),), 2)
        for node in (wide, relu, partial, whole, value):
            SOURCE[node] = Source("model.py", 10 + index, "return x + self.down(relu(self.up(x)))", f"h.{index}.mlp")
    total = emit.call(aten.sum.default, value)
    loss = emit.call(reshard, total, LOSS)
    shardings |= {total: TOTAL, loss: LOSS}
    strategies[total] = Strategy((X,), (TOTAL,), (("dp", "d0"),), 2)
    output.args = ((loss,),)
    for node, sharding in shardings.items():
        DIMS[node], SHARDING[node] = (tuple((int(size),) for size in node.meta["val"].shape),), (sharding,)
        PHASE[node] = "forward"
    for node, strategy in strategies.items():
        STRATEGY[node] = strategy  # type: ignore[index]
    names = [(f"h.{i}.{name}.weight", node) for i, pair in enumerate(weights) for name, node in zip(("up", "down"), pair, strict=True)]
    parameters = tuple(_parameter(name, node.meta["val"]) for name, node in (*names, ("table", table)))
    signature = Signature((Input("batch", "0", (8, 6), torch.float32), *parameters), (Output("loss", "0", (), torch.float32, True),))
    return Program(graph, MESH, signature, Form.GLOBAL)


def _parameter(name: str, value: torch.Tensor) -> Input:
    return Input("parameter", name, tuple(value.shape), value.dtype, True)


@dataclass(frozen=True)
class Other:
    strategy: Strategy
    extra_seconds: float
    num_nodes: int = 1


class Search(ShardingDecision):
    """A search that knows one alternative for `up`, and none for anything else."""

    def __init__(self) -> None:
        reasons = {"table": "pinned by the user", "h.0.up.weight": "next best [6@tp, 10]: 1.2 ms"}
        problem = Problem((AssignmentNode("any", (), (Candidate((), ("a",), 0.0),)),), lambda value, source, target: 0.0)
        asked = SimpleNamespace(problem=problem, strategies=[("a",)], index=defaultdict(int))
        super().__init__({}, reasons, search(problem), asked)  # type: ignore[arg-type]

    def runner_up(self, node: str) -> Other | None:
        return Other(Strategy((), (ROW,)), 1.2e-3) if node.startswith("up") else None

    def __str__(self) -> str:
        return "7 nodes, 12 variables"


def compiled(changed: Program | None = None, search: Search | None = None) -> Compiled:
    given = changed or program()
    text = "RUN f0 (x) -> (relu_default)\nLAUNCH all_reduce sum tp (relu_default) -> r\nWAIT r"
    schedule = Schedule(parse(text), {}, ("x",), ("r",), given.signature, buffers_of(text, {}))
    earlier = given.copy()
    relu = earlier.node("relu_default")
    relu.target = aten.gelu.default
    steps = (PassRun(1, "find atoms", 0.1, earlier), PassRun(2, "choose shardings", 0.2, given))
    return Compiled.of(
        given,
        given,
        replace(given, form=Form.LOCAL),
        whole(given.mesh, schedule),
        Plan.of(given, search),
        steps=steps,
        search=search,
        cost=CostModel(Cluster.named("8xH100"), MESH),
    )


def test_summary_is_json_with_the_sums_of_the_program() -> None:
    found = json.loads(json.dumps(summary(compiled())))
    assert found["mesh"] == {"dp": 2, "tp": 2}
    assert found["flops"]["original"] == found["flops"]["executed"] == LAYERS * 2 * (2 * 8 * 6 * 10)
    assert found["flops_split"] == 1.0
    # A rank holds [4, 6] float32, 96 bytes, and a ring of two sends 2 · ½ of it; the loss has 4 bytes.
    assert found["communication"] == {
        "tp": {"all_reduce": {"forward": 96.0 * LAYERS, "backward": 0.0, "count": LAYERS}},
        "dp": {"all_reduce": {"forward": 4.0, "backward": 0.0, "count": 1}},
    }
    assert found["memory"]["parameters"] == 4 * (LAYERS * (60 + 60) / 2 + 21)
    assert found["seconds"]["total"] == pytest.approx(
        found["seconds"]["compute"] + found["seconds"]["memory"] + sum(found["seconds"]["communication"].values())
    )


def test_flops_split_falls_when_work_is_repeated() -> None:
    one = program()
    node = one.node("mm_default")
    STRATEGY[node] = Strategy((X, Sharding(((), ()))), (X,), (("dp", "m"),), 2)
    found = summary(compiled(one))
    # Six equal contractions, one of which both tp ranks run.
    assert found["flops_split"] == pytest.approx(6 / 7)
    entry = next(entry for entry in found["replicated"] if entry["op"] == "aten.mm")
    assert (entry["axes"], entry["count"], entry["module"], entry["flops"]) == (["tp"], 1, "h.*.mlp", 2 * 4 * 6 * 10)


def test_replicated_ops_of_equal_layers_are_one_entry() -> None:
    entries = {entry["op"]: entry for entry in summary(compiled())["replicated"]}
    assert set(entries) == {"aten.add.Tensor", "aten.sum"}
    assert entries["aten.add.Tensor"]["count"] == LAYERS and entries["aten.add.Tensor"]["axes"] == ["tp"]
    # Two operands and one result of [4, 6] float32 on a rank; the first layer adds x to its branch.
    assert entries["aten.add.Tensor"]["bytes"] == LAYERS * 3 * 96
    assert entries["aten.add.Tensor"]["seconds"] > 0


def test_passing_partial_sums_through_splits_no_work() -> None:
    one = program()
    total = one.node("sum_default")
    STRATEGY[total] = Strategy((X,), (TOTAL,), (("dp", "d0"), ("tp", "sum")), 2)
    assert "aten.sum" in {entry["op"] for entry in summary(compiled(one))["replicated"]}


def test_saved_activations_are_what_is_marked_as_saved() -> None:
    one = program()
    emit = Emitter(one.graph, one.graph.output_node())
    wide = one.node("mm_default")
    saved = emit.call(save, wide)
    reader = emit.call(aten.neg.default, saved)
    for node, phase in ((saved, "forward"), (reader, "backward")):
        DIMS[node], SHARDING[node], PHASE[node] = DIMS[wide], SHARDING[wide], phase
        STRATEGY[node] = Strategy(SHARDING[wide], SHARDING[wide], (("dp", "d0"), ("tp", "d1")), 4)
    # [4, 5] float32 of [8@dp, 10@tp].
    assert summary(compiled(one))["memory"]["saved_activations"] == 80.0


def test_explain_speaks_of_columns_and_rows_and_folds_layers() -> None:
    text = explain(compiled(search=Search()), detail="all")
    assert "dp=2 × tp=2, cluster 8xH100: 17 ops, 100.0% of the model's FLOPs computed once" in text
    assert "search: 7 nodes, 12 variables" in text
    assert "  h.*.up.weight [6, 10@tp]   split dim 1 over tp (column)   × 3\n      instead: [6@tp, 10] +1.2 ms a step\n" in text
    assert "  h.*.down.weight [10@tp, 6]   split dim 0 over tp (row: partial sums)   × 3\n      instead: nothing else is legal\n" in text
    assert "  h.*.mlp forward aten.mm [8@dp, 6] × [6, 10@tp] → [8@dp, 10@tp]   dp:m tp:n   × 3" in text
    assert "tp     forward  all_reduce        3 ×       288 B" in text


def test_explain_says_what_does_not_divide_and_who_pinned() -> None:
    text = explain(compiled(search=Search()), detail="all")
    section = text[text.index("  table") :].split("\n\n")[0]
    assert section.splitlines() == [
        "  table [7, 3]   on every rank",
        "      pinned by the user",
        "      dim 0: 7 does not divide by tp = 2",
        "      dim 1: 3 does not divide by tp = 2",
    ]


def test_indivisible_shows_prime_factors_and_leaves_out_the_batch_axis() -> None:
    dims = ((50257,), (1024,))
    assert list(indivisible(dims, Sharding(((), ("tp",))), MESH)) == ["dim 0: 50257 = 29·1733 does not divide by tp = 2"]
    assert list(indivisible(((50304,),), Sharding(((),)), MESH)) == []
    assert list(indivisible(((3, 5),), Sharding(((), ())), MESH)) == ["dim 0: 3 × 5 does not divide by tp = 2"]
    assert list(indivisible(((3, 4),), Sharding(((), ())), MESH)) == []
    assert list(indivisible(((27,),), Sharding(((),)), MESH)) == ["dim 0: 27 = 3^3 does not divide by tp = 2"]


def test_why_shows_matches_only_with_how_values_arrive() -> None:
    text = why(compiled(search=Search()), "*.up.*")
    assert text.splitlines()[0].startswith("h.*.up.weight") and "down" not in text
    flow = why(compiled(search=Search()), "mlp")
    assert flow.startswith("h.*.mlp forward aten.mm") and "weight" not in flow
    with pytest.raises(AutoparError, match=r"'nothing' matches no parameter, and no module or op that computes; there are h.0.up.weight"):
        why(compiled(), "nothing")


def test_why_tells_the_collective_of_an_operand() -> None:
    one = program()
    node = one.node("mm_default_2")
    with one.graph.inserting_before(node):
        gathered = one.graph.call_function(reshard, (node.args[1], Sharding(((), ()))))
    gathered.meta["val"] = node.args[1].meta["val"]  # type: ignore[union-attr]
    DIMS[gathered], SHARDING[gathered], PHASE[gathered] = (((6,), (10,)),), (Sharding(((), ())),), "forward"
    node.args = (node.args[0], gathered)
    assert "    operand 1: all_gather over tp, 120 B," in why(compiled(one), "h.1.mlp")


class Custom(torch.nn.Module):
    """Two ops that nobody wrote a rule for; one of them can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.autopar_inspect_test.running(torch.ops.autopar_inspect_test.twice(self.rows(x)))


@torch.library.custom_op("autopar_inspect_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x.sin()


@torch.library.custom_op("autopar_inspect_test::running", mutates_args=())
def running(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().cumsum(0).view_as(x)


twice.register_fake(torch.empty_like)
running.register_fake(torch.empty_like)


def test_rules_found_by_probing_are_marked_and_ops_without_one_named() -> None:
    with torch.no_grad():
        parallel = autopar.compile(Custom().eval(), autopar.virtual_mesh(dp=2, tp=2), example_inputs=(torch.randn(4, 6),), backend="eager")
    found = parallel.summary()
    assert found["inferred"] == [{"op": "autopar_inspect_test.twice", "module": "", "count": 1}]
    assert {entry["op"]: entry["rule"] for entry in found["replicated"]}["autopar_inspect_test.running"] == "none"
    text = parallel.explain(detail="all")
    assert "rules inferred by probing, not written by hand\n  autopar_inspect_test.twice × 1" in text
    assert re.search(r"autopar_inspect_test.running × 1: the same on every rank along dp, tp, .*, no rule for it", text)
    assert "its rule was inferred by probing" in parallel.why("autopar_inspect_test.twice")
    assert "no rule: the same on every rank" in parallel.why("autopar_inspect_test.running")


def test_print_program_after_a_pass_or_of_a_rank() -> None:
    one = compiled()
    assert "aten.gelu" in print_program(one, after="find atoms")
    assert "aten.gelu" not in print_program(one, after="choose shardings")
    text = print_program(one, rank=3)
    assert text.startswith("rank 3 at dp 1, tp 1\n\nLOCAL program on dp=2 × tp=2")
    assert "schedule: 3 instructions, 0 fragments\n      0  RUN f0 (x) -> (relu_default)   # h.0.mlp\n      1  LAUNCH all_reduce" in text
    with pytest.raises(AutoparError, match="no pass 'search' ran; these did: find atoms, choose shardings"):
        print_program(one, after="search")
    with pytest.raises(AutoparError, match=r"rank 4 is not on the mesh \(dp=2 × tp=2\): ranks are 0 to 3"):
        print_program(one, rank=4)


def test_diff_counts_ops_and_shows_lines() -> None:
    text = diff(compiled(), "find atoms", "choose shardings")
    assert text.splitlines()[0] == "after 'find atoms' → after 'choose shardings': -1 aten.gelu, +1 aten.relu"
    assert "-    %relu_default : f32[8@dp, 10@tp] = aten.gelu(%mm_default)" in text
    assert "+    %relu_default : f32[8@dp, 10@tp] = aten.relu(%mm_default)" in text


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        (["h.0.fc"], [], "h.0.fc"),
        (["h.0.fc", "h.1.fc"], ["h.0.fc", "h.1.fc"], "h.*.fc"),
        (["h.0.fc", "h.2.fc", "h.3.fc"], ["h.1.fc"], "h.{0,2-3}.fc"),
        (["h.0.up.1", "h.1.up.1"], [], "h.*.up.1"),
        (["h.0.up.1", "h.1.up.2"], [], "h.*.up.*"),
    ],
)
def test_folded_names(names: list[str], others: list[str], expected: str) -> None:
    assert folded(names, others) == expected


def test_patterns_and_units() -> None:
    assert pattern_of("transformer.h.10.mlp.c_fc.weight") == "transformer.h.*.mlp.c_fc.weight"
    assert pattern_of("ln_1.weight") == "ln_1.weight"
    assert in_seconds(1.234e-3, sign=True) == "+1.23 ms" and in_seconds(-2e-6, sign=True) == "-2 µs" and in_seconds(3e-10) == "0.3 ns"
    assert in_bytes(12_600_000) == "12.6 MB" and in_bytes(12) == "12 B"


def test_of_a_pipeline_a_rank_shows_its_row_its_stage_and_its_actions() -> None:
    compiled = plain_pipe().compiled
    for rank, stage in ((0, 0), (3, 1)):
        text = print_program(compiled, rank=rank)
        head, grid, program, *_ = text.split("\n\n")
        assert head == f"rank {rank} at pp {stage}, dp {rank % 2}, tp 0"
        assert grid.splitlines() == [str(compiled.order).splitlines()[0], str(compiled.order).splitlines()[1 + stage]]
        assert program.startswith("LOCAL program on pp=2 × dp=2 × tp=1 × mb=2: ") and f", of which stage {stage} has " in program
        assert f"stage {stage} %" in text and f"stage {1 - stage} %" not in text
        assert ("parameter table.weight" in text) == (stage == 0) and ("parameter head.weight" in text) == (stage == 1)
        assert ("gradient table.weight" in text) == (stage == 0) and ("loss 0" in text) == (stage == 1)
        shown = [line for line in print_schedule(compiled, rank).splitlines()[1:] if not line.startswith("  # ")]
        assert [line.split("   # ")[0][9:] for line in shown] == [str(each) for each in compiled.schedules[stage].instructions]


def test_instructions_stand_under_their_actions() -> None:
    compiled = plain_pipe().compiled
    for rank, row in zip((0, 2), compiled.order.orders, strict=True):
        lines = print_schedule(compiled, rank).splitlines()
        headings = [line.removeprefix("  # ") for line in lines if line.startswith("  # ")]
        assert [heading for heading in headings if heading[0].isdigit()] == [str(action) for action in row]
        first = lines[lines.index(f"  # {row[0]}") + 1]
        assert "RUN" in first and "@0" in first
        assert headings[-1] == "after the last microbatch"
        sends = [number for number, line in enumerate(lines) if "SEND 0F" in line or "SEND 1B" in line]
        assert sends and all(_heading(lines, number) in ("between actions", "after the last microbatch") for number in sends)


def _heading(lines: list[str], number: int) -> str:
    return next(line.removeprefix("  # ") for line in reversed(lines[:number]) if line.startswith("  # "))


def test_stages_show_after_the_pass_that_places_them() -> None:
    compiled = plain_pipe().compiled
    assert "stage 1" not in print_program(compiled, after="insert reshards")
    text = print_program(compiled, after="place stages")
    assert re.search(r"^ +stage 0 %\w+ +: .* = aten.embedding", text, re.MULTILINE)
    assert re.search(r"^ +stage 1 %\w+ +: .* = aten.mm\(", text, re.MULTILINE)


def test_only_ranks_in_space_are_on_the_mesh() -> None:
    with pytest.raises(AutoparError, match=r"rank 4 is not on the mesh \(pp=2 × dp=2 × tp=1\): ranks are 0 to 3"):
        print_program(plain_pipe().compiled, rank=4)


def test_explain_says_what_the_slowest_rank_takes() -> None:
    text = plain_pipe().explain(detail="all")
    assert text.startswith("pp=2 × dp=2 × tp=1, 2 microbatches, cluster 8xa100: ")
    assert re.search(r"step of the slowest rank, at pp [01], .* communication pp .*, nothing overlapped", text)
    assert "bytes a rank that holds most: parameters" in text
    assert re.search(r"pp +forward +send +2 × ", text) and "mb" not in text.split("communication, bytes")[1]


def test_print_program_and_diff_of_one_module() -> None:
    case = zoo.gpt2(2).to(torch.float32)
    one = captures.compiled(case.model, {"dp": 2, "tp": 2}, case.batch).compiled
    whole, part = (print_program(one, after="insert reshards", module=module) for module in (None, "transformer.h.1.mlp"))
    assert "aten.mm" in part and 5 * len(part) < len(whole) and "transformer.h.0" not in part and "h.1.attn" not in part
    assert re.match(r"GLOBAL program on dp=2 × tp=2: \d+ nodes, of which \d+ are shown\n\ninputs\n +parameter transformer.h.1.mlp", part)
    rank = print_program(one, module="transformer.h.1.mlp")
    assert "RUN " in rank and "LAUNCH " in rank and 3 * len(rank) < len(print_program(one))
    changed = diff(one, "insert reshards", "lower", module="transformer.h.1.mlp")
    assert "+++ after" in changed and "h.0" not in changed and 3 * len(changed) < len(diff(one, "insert reshards", "lower"))
    with pytest.raises(AutoparError, match=r"module='transformer.h.7' computes nothing in this program; there are transformer.h"):
        print_program(one, module="transformer.h.7")
    with pytest.raises(AutoparError, match="instructions, of no module"):
        print_program(one, after="write actions", module="transformer.h.1")


def test_a_prompt_shows_reports_as_print_does() -> None:
    parallel = captures.compiled(torch.nn.Linear(4, 4), {"dp": 2}, (torch.randn(4, 4),))
    texts = (parallel.explain(), parallel.why("weight"), parallel.print_program(), parallel.diff("trace joint", "lower"))
    assert all(repr(each) == str(each) and "\n" in repr(each) and json.loads(json.dumps(each)) == each for each in texts)
