"""Plans for real shapes without running them: how long the search takes, what it finds, what Megatron's plan would cost.

    python -m benchmarks.planning                                    GPT-2-medium and Llama-3-8B, full depth, tp 2, 4, 8
    python -m benchmarks.planning --models gpt2-medium --layers 4 --tp 2 --json planning.json

One sequence in bf16 per data-parallel rank on a node of eight H100; parameters on meta, so no memory is needed.
Nobody tells the search what Megatron does. Its plan is written down here (`Shape.megatron`) to compare with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.manager import History, run_passes
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.plans.decisions import ShardingDecision
from autopar.plans.plan import Pins
from autopar.reports.summary import transfers
from benchmarks.reporting import print_table, write_json

CLUSTER = "8xH100"
ITEMSIZE = 2  # bytes of bf16
FEW = 3  # what deeper models send more than one of so many layers is their middle layers'


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `megatron` is the plan that Megatron-LM has written into its layers, as pins."""

    name: str
    num_layers: int
    width: int
    length: int
    vocabulary: int
    build: Callable[[Shape, int], nn.Module]
    megatron: Pins

    def megatron_bytes(self, tp: int) -> float:
        """What one rank sends per layer and direction: two ring all-reduces of one sequence's hidden states."""
        return 2 * 2 * (tp - 1) / tp * self.length * self.width * ITEMSIZE


def _gpt2(shape: Shape, num_layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=shape.width, n_head=16, n_positions=shape.length, vocab_size=shape.vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(shape: Shape, num_layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=shape.width, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=shape.vocabulary, max_position_embeddings=2 * shape.length, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


COLUMN, ROW, VOCABULARY, COLUMN_BIAS, WHOLE = (None, "tp"), ("tp", None), ("tp", None), ("tp",), ()
# nn.Linear keeps its weight transposed: a column split is of dim 0 there, and of dim 1 in GPT-2's Conv1D.
LINEAR_COLUMN, LINEAR_ROW = ("tp", None), (None, "tp")
GPT2_MEDIUM = Shape(
    "gpt2-medium", 24, 1024, 1024, 50_304, _gpt2,
    {
        "*": WHOLE, "transformer.wte.weight": VOCABULARY,
        "*.c_attn.weight": COLUMN, "*.c_attn.bias": COLUMN_BIAS, "*.attn.c_proj.weight": ROW,
        "*.c_fc.weight": COLUMN, "*.c_fc.bias": COLUMN_BIAS, "*.mlp.c_proj.weight": ROW,
    },
)  # fmt: skip
LLAMA_3_8B = Shape(
    "llama-3-8b", 32, 4096, 4096, 128_256, _llama,
    {
        "*": WHOLE, "model.embed_tokens.weight": VOCABULARY, "lm_head.weight": LINEAR_COLUMN,
        "*.q_proj.weight": LINEAR_COLUMN, "*.k_proj.weight": LINEAR_COLUMN, "*.v_proj.weight": LINEAR_COLUMN, "*.o_proj.weight": LINEAR_ROW,
        "*.gate_proj.weight": LINEAR_COLUMN, "*.up_proj.weight": LINEAR_COLUMN, "*.down_proj.weight": LINEAR_ROW,
    },
)  # fmt: skip
SHAPES = {shape.name: shape for shape in (GPT2_MEDIUM, LLAMA_3_8B)}


@dataclass(frozen=True)
class Planned:
    """A GLOBAL program with its reshards, and the decision that put them there."""

    program: Program
    decision: ShardingDecision
    cost: CostModel

    def sent(self, phase: str) -> float:
        """Bytes that one rank sends in "forward" or "backward"."""
        return sum(transfer.bytes for transfer in transfers(self.program, self.cost) if transfer.phase == phase)


def traced(shape: Shape, num_layers: int, num_sequences: int = 1) -> Program:
    """GLOBAL, simplified, before anything is decided: the same for every mesh with dp = 1."""
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model = shape.build(shape, num_layers)
    tokens = torch.zeros(num_sequences, shape.length, dtype=torch.int64)
    forward = capture(model, (), {"input_ids": tokens, "labels": tokens}, virtual_mesh(dp=1), None, {0: 0, 1: 0})
    return run_passes(forward, _passes(CLUSTER)[: _first_of_mesh(CLUSTER)])


def planned(program: Program, tp: int, pins: Pins | None = None, cluster: str = CLUSTER, timeout: float | None = None) -> Planned:
    """Decide on `program` of `traced` for dp = 1, tp ranks."""
    history = History()
    passes = _passes(cluster, pins, timeout)
    last = next(number for number, each in enumerate(passes) if isinstance(each, InsertReshards))
    passes = passes[_first_of_mesh(cluster) : last + 1]
    result = run_passes(program.copy(mesh=virtual_mesh(dp=1, tp=tp)), passes, (history,))
    return Planned(result, history.decision(ChooseShardings), CostModel(Cluster.named(cluster), result.mesh))


def _passes(cluster: str, pins: Pins | None = None, timeout: float | None = None) -> tuple[Any, ...]:
    return default_passes(Options(Cluster.named(cluster), pins=pins, search_timeout=timeout), True, None)


def _first_of_mesh(cluster: str) -> int:
    """Where the passes begin that know of the mesh."""
    return next(number for number, each in enumerate(_passes(cluster)) if isinstance(each, FindAtoms))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def measure(shape: Shape, num_layers: int, tensor_parallel: list[int], cluster: str) -> list[dict[str, Any]]:
    """One row per size of tp."""
    start = time.perf_counter()
    program = traced(shape, num_layers)
    trace_seconds = time.perf_counter() - start
    shallow = traced(shape, FEW)
    rows: list[dict[str, Any]] = []
    for tp in tensor_parallel:
        start = time.perf_counter()
        found = planned(program, tp, cluster=cluster)
        seconds = time.perf_counter() - start
        few, pinned = planned(shallow, tp, cluster=cluster), planned(program, tp, shape.megatron, cluster)
        row = {"model": shape.name, "layers": num_layers, "tp": tp, "ops": program.num_nodes, "trace s": trace_seconds}
        row |= {"plan s": seconds, "search s": found.decision.solution.search_seconds, "gap %": 100 * found.decision.gap}
        row |= {"step ms": 1e3 * found.decision.cost_seconds, "Megatron's ms": 1e3 * pinned.decision.cost_seconds}
        for phase in ("forward", "backward"):
            per_layer = (found.sent(phase) - few.sent(phase)) / (num_layers - FEW)
            row[f"{phase} bytes / Megatron's"] = per_layer / shape.megatron_bytes(tp)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="instead of each model's own number; at least 4")
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--cluster", default=CLUSTER, help="see autopar.Cluster.named")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    if options.layers is not None and options.layers <= FEW:
        parser.error(f"--layers {options.layers}: at least {FEW + 1} are needed to tell a middle layer's share")
    rows: list[dict[str, Any]] = []
    for name in options.models:
        shape = SHAPES[name]
        rows += measure(shape, options.layers or shape.num_layers, options.tp, options.cluster)
    print_table(f"plans for {options.cluster}, one sequence in bf16 per data-parallel rank", rows)
    write_json(options.json, {"cluster": options.cluster, "plans": rows})


if __name__ == "__main__":
    main()
