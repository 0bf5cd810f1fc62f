"""What the summary says of programs with stages and microbatches. (Of a program made by hand: test_inspect.py.)"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.ir.keys import STAGE, STRATEGY
from autopar.ir.mesh import virtual_mesh
from autopar.pipeline.report import StepOnPaper
from autopar.pipeline.stage_work import Work
from autopar.reports.summary import contractions, cost_of, flops, flops_of, memory, replicated, seconds
from autopar.runtime.module.parallel_module import ParallelModule
from tests.support.models.residual import BATCH, LENGTH, WIDTH, interleaved_pipe, piped, plain_pipe

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False))


@cache
def language_model(make: Any) -> ParallelModule:
    """On pp2 × dp2 × tp2 with four microbatches."""
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (8, 16))
    mesh = virtual_mesh(pp=2, dp=2, tp=2)
    batch = {"input_ids": ids, "labels": ids}
    return autopar.compile(make(), mesh, example_inputs=batch, backend="eager", num_microbatches=4)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_every_flop_is_computed_once(make: Any) -> None:
    found = language_model(make).summary()
    assert found["flops_split"] == pytest.approx(1.0)
    assert found["mesh"] == {"pp": 2, "dp": 2, "tp": 2, "mb": 4}


@pytest.mark.parametrize(("axis", "times"), [("tp", 2), ("dp", 2), ("mb", 4)])
def test_work_that_is_repeated_on_purpose_shows(axis: str, times: int) -> None:
    program = language_model(gpt2).compiled.program.copy()
    original, executed = flops(program)
    assert executed == pytest.approx(original)
    node = next(each for each in contractions(program) if {axis} <= set(dict(STRATEGY[each].factors)))
    strategy = STRATEGY[node]
    factors = tuple(each for each in strategy.factors if each[0] != axis)
    STRATEGY[node] = replace(strategy, factors=factors, num_shards=strategy.num_shards // times)
    assert flops(program) == (original, pytest.approx(original + (times - 1) * flops_of(node)))
    (entry,) = [each for each in replicated(program, CostModel(Cluster.ideal(), program.mesh)) if each["flops"]]
    assert entry["axes"] == [axis] and entry["flops"] == pytest.approx(flops_of(node) / strategy.num_shards * times * 4)


def test_what_every_stage_computes_for_itself_counts_for_each() -> None:
    program = language_model(gpt2).compiled.program.copy()
    before, work = flops(program)[1], Work(program)
    node = next(each for each in contractions(program) if len({stage for user in each.users for stage in work.stages[user]}) == 1)
    reader = next(iter(node.users))
    with program.graph.inserting_after(reader):
        other = program.graph.node_copy(reader)
    del node.meta[STAGE]
    STAGE[other] = 1 - STAGE[reader]
    assert flops(program)[1] == pytest.approx(before + flops_of(node))


def test_the_summary_of_a_pipeline_is_json() -> None:
    found = json.loads(json.dumps(plain_pipe().summary()))["pipeline"]
    assert (found["schedule"], found["num_microbatches"], [stage["rank"] for stage in found["stages"]]) == ("1f1b", 2, [0, 1])
    assert found["critical_path"][0] == "0F0" and found["step_seconds"] > 0 and 0 < found["bubble"] < 1
    assert [stage["live_microbatches"] for stage in found["stages"]] == [2, 1]
    assert set(found["stages"][0]["seconds"]) == {"forward", "input_gradient", "weight_gradient"}


def test_without_stages_and_microbatches_there_is_no_pipeline() -> None:
    assert piped(pp=1, num_microbatches=1).summary()["pipeline"] is None


def test_stages_send_each_other_what_they_are_said_to() -> None:
    found = plain_pipe().summary()
    sent, (first, last) = found["communication"]["pp"]["send"], found["pipeline"]["stages"]
    assert sent["forward"] == 2 * first["sent_bytes"]["forward"] > 0 and last["sent_bytes"]["forward"] == 0
    assert sent["backward"] == 2 * last["sent_bytes"]["backward"] > 0 and first["sent_bytes"]["backward"] == 0
    hidden = BATCH // 2 * LENGTH * WIDTH * 8
    assert sent["backward"] % hidden == 0


def test_gradients_are_reduced_once_a_step_and_microbatches_not_at_all() -> None:
    one, two = piped(pp=1, num_microbatches=1), piped(pp=1, num_microbatches=2)
    assert two.summary()["communication"]["dp"]["all_reduce"]["backward"] == one.summary()["communication"]["dp"]["all_reduce"]["backward"]
    assert "mb" not in two.summary()["communication"]


def test_the_loop_counts_once_for_each_microbatch() -> None:
    compiled = piped(pp=1, num_microbatches=2).compiled
    prices = StepOnPaper(compiled.program, compiled.cost, compiled.order).prices.stages[0]
    total = seconds(compiled.program, cost_of(compiled))["total"]
    assert total == pytest.approx(2 * (prices.forward_seconds + prices.seconds("B")) + prices.reduce_seconds)


def test_seconds_are_those_of_the_slowest_rank() -> None:
    compiled = plain_pipe().compiled
    found = seconds(compiled.program, cost_of(compiled), compiled.order.stages)
    stages = StepOnPaper(compiled.program, compiled.cost, compiled.order).prices.stages
    computed = [2 * (stage.forward_seconds + stage.seconds("B")) + stage.reduce_seconds for stage in stages]
    assert found["rank"] == computed.index(max(computed))
    assert found["total"] - found["communication"]["pp"] == pytest.approx(max(computed))


def test_a_rank_with_two_stages_holds_both() -> None:
    compiled = interleaved_pipe().compiled
    found = memory(compiled.program, cost_of(compiled), compiled.order)
    prices = StepOnPaper(compiled.program, compiled.cost, compiled.order).prices.stages
    held = [sum(price.held_bytes for price, home in zip(prices, compiled.order.stages, strict=True) if home == rank) for rank in (0, 1)]
    assert sum(found.values()) - found["saved_activations"] == pytest.approx(max(held))
