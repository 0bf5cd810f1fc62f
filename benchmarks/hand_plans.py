"""Plans that people write by hand, priced by the same model as the plan that is found.

    python -m benchmarks.hand_plans                      three models, five clusters, two layers each
    python -m benchmarks.hand_plans --models bert-large --clusters 8xA100 --layers 4

On dp2 × tp4. What is found may do all that a hand-written plan does: split the batch over both axes, parameters over both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.driver.manager import History, run_passes
from autopar.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.mark_pinned import MarkPinned
from autopar.plans.decisions import ShardingDecision
from autopar.plans.plan import Pins
from benchmarks.planning import COLUMN_BIAS, GPT2_MEDIUM, LINEAR_COLUMN, LINEAR_ROW, LLAMA_3_8B, VOCABULARY, WHOLE, Shape, default_dtype
from benchmarks.reporting import print_table, write_json

MESH = virtual_mesh(dp=2, tp=4)
SEQUENCES = 8
CLUSTERS = ("8xV100", "8xA100", "8xH100", "8xB200", "8xMI300X")
SPLIT_SEQUENCE = (None, "tp", None)


def _bert(shape: Shape, num_layers: int) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=num_layers, hidden_size=shape.width, num_attention_heads=16, intermediate_size=4 * shape.width,
        vocab_size=shape.vocabulary, max_position_embeddings=shape.length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


BERT_LARGE = Shape(
    "bert-large", 24, 1024, 512, 30_528, _bert,
    {
        "*": WHOLE, "bert.embeddings.word_embeddings.weight": VOCABULARY,
        "*.self.*.weight": LINEAR_COLUMN, "*.self.*.bias": COLUMN_BIAS, "*.output.dense.weight": LINEAR_ROW,
        "*.intermediate.dense.weight": LINEAR_COLUMN, "*.intermediate.dense.bias": COLUMN_BIAS,
    },
)  # fmt: skip
SHAPES = {shape.name: shape for shape in (GPT2_MEDIUM, LLAMA_3_8B, BERT_LARGE)}
# What is split over the sequence in Megatron's sequence parallelism: what attention and MLP leave, and what norms make.
SEQUENCE: dict[str, Pins] = {
    "gpt2-medium": {"transformer.h.*.attn": SPLIT_SEQUENCE, "transformer.h.*.mlp": SPLIT_SEQUENCE},
    "llama-3-8b": {"model.layers.*.self_attn": SPLIT_SEQUENCE, "model.layers.*.mlp": SPLIT_SEQUENCE},
    "bert-large": {
        "bert.encoder.layer.*.attention.output.dense": SPLIT_SEQUENCE,
        "bert.encoder.layer.*.output.dense": SPLIT_SEQUENCE,
    },
}


@dataclass(frozen=True)
class HandPlan:
    """Pins, and what the axes may split."""

    name: str
    pins: Pins
    freedom: Freedom


# What is found may do all that the plans below do.
FREE = HandPlan("found", {}, Freedom(("dp",), ("tp",), shards_parameters=True))


def hand_plans(shape: Shape, program: Program) -> Iterator[HandPlan]:
    """Megatron's, the same with sequence parallelism, pure data parallelism, and fully sharded data parallelism."""
    yield HandPlan("Megatron", shape.megatron, Freedom())
    yield HandPlan("Megatron, sequence parallel", {**shape.megatron, **SEQUENCE[shape.name]}, Freedom())
    yield HandPlan("data parallel", {"*": WHOLE}, Freedom(("dp", "tp")))
    sharded = {
        item.name: (("dp", "tp"), *[None] * (len(item.shape) - 1))
        for item in program.signature.inputs_of("parameter")
        if _divides(item.shape)
    }
    yield HandPlan("fully sharded", sharded, Freedom(("dp", "tp"), shards_parameters=True))


def _divides(shape: tuple[int, ...]) -> bool:
    return shape[0] % MESH.size == 0


@cache
def traced(name: str, num_layers: int) -> Program:
    """Up to where pins are marked: the same for all plans and clusters."""
    shape = SHAPES[name]
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model = shape.build(shape, num_layers)
    tokens = torch.zeros(SEQUENCES, shape.length, dtype=torch.int64)
    forward = capture(model, (), {"input_ids": tokens, "labels": tokens}, MESH, None, {0: 0, 1: 0})
    passes = default_passes(Options(Cluster.ideal()), True, None)
    return run_passes(forward, passes[: _place(passes, MarkPinned)])


def _place(passes: tuple[Any, ...], kind: type) -> int:
    return next(number for number, each in enumerate(passes) if isinstance(each, kind))


def priced(shape: Shape, num_layers: int, plan: HandPlan, cluster: str) -> ShardingDecision:
    """The decision with the plan's pins kept."""
    options = Options(Cluster.named(cluster), pins=plan.pins or None, freedom=plan.freedom)
    passes, history = default_passes(options, True, None), History()
    program = traced(shape.name, num_layers).copy(freedom=plan.freedom)
    run_passes(program, passes[_place(passes, MarkPinned) : _place(passes, ChooseShardings) + 1], (history,))
    return history.decision(ChooseShardings)


def measure(shape: Shape, num_layers: int, cluster: str) -> dict[str, Any]:
    """Milliseconds of a step by each plan, and how far from its bound the found one is."""
    found = priced(shape, num_layers, FREE, cluster)
    row: dict[str, Any] = {"model": shape.name, "cluster": cluster, "found ms": 1e3 * found.cost_seconds, "gap %": 100 * found.gap}
    for plan in hand_plans(shape, traced(shape.name, num_layers)):
        try:
            row[f"{plan.name} ms"] = 1e3 * priced(shape, num_layers, plan, cluster).cost_seconds
        except PlanError as error:
            raise PlanError(f"{plan.name} on {cluster}: {error}") from error
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    rows = [measure(SHAPES[name], options.layers, cluster) for name in options.models for cluster in options.clusters]
    print_table(f"step of {options.layers} layers on {MESH}, {SEQUENCES} sequences in bf16", rows)
    write_json(options.json, {"plans": rows})


if __name__ == "__main__":
    main()
