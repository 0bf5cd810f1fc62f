"""How long the search for shardings takes at real sizes, and how far from the best its answer can be.

    python -m benchmarks.search                              Llama 1B, 8B on (2, 4, 8), 70B on (8, 8), with and without a tight budget
    python -m benchmarks.search --models llama-8b --bound    the bound of the whole problem, too: no folding, no merging, nothing left out
    python -m benchmarks.search --models llama-8b --layers 2 4 8 16 32       how time grows with depth
    python -m benchmarks.search --models llama-1b --highs 120    beside HiGHS alone, on what is left after folding, for so many seconds
    python -m benchmarks.search --models llama-70b --whole   from meta parameters to the plan, with the memory that takes

The batch is split over the first axis, may be split over the second, never over the third; everything else may be split over
every axis. 16 sequences of 4,096 tokens in bf16, Adam, nodes of eight H100 of 80 GB.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.driver.garbage import collection_paused
from autopar.driver.manager import run_passes
from autopar.frontend.capture import capture
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh, virtual_mesh
from autopar.ir.program import Program
from autopar.partition.sharding_problem import ShardingProblem
from autopar.partition.solver.ascent import Ascent
from autopar.partition.solver.evaluation import Evaluation
from autopar.partition.solver.integer_program import IntegerProgram
from autopar.partition.solver.search import reduced
from autopar.partition.solver.tables import Tables
from autopar.passes.global_.choose_shardings import ChooseShardings
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.plans.plan import Plan
from benchmarks.planning import default_dtype
from benchmarks.reporting import print_table, write_json

CLUSTER = Cluster.named("8xH100")
SEQUENCES, LENGTH = 16, 4096
DEVICE_MEMORY = "80GB"
SWEEPS = 60
HIGHS_GAP = 0.005


@dataclass(frozen=True)
class Size:
    """A model of the Llama family, the mesh it is planned for, and a budget that is hard to meet."""

    name: str
    num_layers: int
    width: int
    inner: int
    num_heads: int
    num_key_heads: int
    mesh: Mesh
    tight: str

    def program(self, num_layers: int) -> Program:
        """GLOBAL with atoms, on this mesh."""
        config = transformers.LlamaConfig(
            num_hidden_layers=num_layers, hidden_size=self.width, intermediate_size=self.inner, num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_heads, vocab_size=128_256, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        with default_dtype(torch.bfloat16), torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
        forward = capture(model, (), {"input_ids": tokens, "labels": tokens}, virtual_mesh(dp=1), None, {0: 0, 1: 0})
        passes = default_passes(Options(CLUSTER), True, None)
        last = next(number for number, each in enumerate(passes) if isinstance(each, FindAtoms))
        found = run_passes(forward, passes[: last + 1])
        return found.copy(mesh=self.mesh, freedom=Freedom(("dp",), ("cp",), shards_parameters=True))


CUBE = Mesh((("dp", 2), ("cp", 4), ("tp", 8)))
SQUARE = Mesh((("dp", 8), ("tp", 8)))
SIZES = {
    size.name: size
    for size in (
        Size("llama-1b", 16, 2048, 8192, 32, 8, CUBE, "6GB"),
        Size("llama-8b", 32, 4096, 14336, 32, 8, CUBE, "14GB"),
        Size("llama-70b", 80, 8192, 28672, 64, 8, SQUARE, "60GB"),
    )
}


def measure(size: Size, num_layers: int, budget: str, program: Program, has_bound: bool, highs_seconds: float) -> dict[str, Any]:
    """One search: seconds from the program with atoms to the decision; beside it what was asked for."""
    choose = ChooseShardings(CLUSTER, budget=MemoryBudget.of(budget))
    start, start_cpu = time.perf_counter(), time.process_time()
    decision = choose.decide(program)
    seconds, cpu_seconds, solution = time.perf_counter() - start, time.process_time() - start_cpu, decision.solution
    row = {
        "model": size.name, "layers": num_layers, "mesh": str(size.mesh), "budget": budget, "ops": program.num_nodes, "seconds": seconds,
        "CPU s": cpu_seconds, "solve s": solution.search_seconds, "load": os.getloadavg()[0],
        "step ms": 1e3 * solution.seconds, "gap %": 100 * solution.gap, "GB": solution.num_bytes / 1e9,
        "strategies": solution.num_variables, "dominated": solution.num_dominated, "bounded": solution.num_bounded,
    }  # fmt: skip
    if has_bound:
        start = time.perf_counter()
        bound = whole_bound(program, solution.seconds_per_byte, MemoryBudget.of(budget))
        row |= {"above the whole problem's bound %": 100 * (solution.seconds / bound - 1), "bound s": time.perf_counter() - start}
    if highs_seconds:
        row |= highs_alone(program, MemoryBudget.of(budget), highs_seconds)
    return row


def highs_alone(program: Program, budget: MemoryBudget, seconds: float) -> dict[str, Any]:
    """HiGHS on the problem that our solver gets, contracted and folded, within `seconds` and to the gap at which ours stops in a budget."""
    _, _, evaluation = reduced(ShardingProblem.of(program, CostModel(CLUSTER, program.mesh), {}, budget).problem)
    model = IntegerProgram.of(evaluation)
    solver = model.solver(HIGHS_GAP, seconds)
    start, start_cpu = time.perf_counter(), time.process_time()
    solver.run()
    info = solver.getInfo()
    return {
        "HiGHS s": time.perf_counter() - start, "HiGHS CPU s": time.process_time() - start_cpu,
        "HiGHS says": solver.modelStatusToString(solver.getModelStatus()), "HiGHS columns": len(model.costs),
        "HiGHS step ms": 1e3 * info.objective_function_value / model.scale, "HiGHS bound ms": 1e3 * info.mip_dual_bound / model.scale,
        "HiGHS simplex steps": info.simplex_iteration_count,
    }  # fmt: skip


def whole_bound(program: Program, seconds_per_byte: float, budget: MemoryBudget) -> float:
    """A lower bound of the problem as it stands, every node and every strategy: the dual of its relaxation, Lagrangian in the budget."""
    problem = ShardingProblem.of(program, CostModel(CLUSTER, program.mesh), {}, budget).problem
    tables = Tables.of(Evaluation(problem))
    ascent = Ascent(tables)
    ascent.add([seconds_per_byte * each for each in tables.held_bytes])
    for _ in range(SWEEPS):
        ascent.sweep(True)
        ascent.sweep(False)
    spare = problem.capacity_bytes - tables.least_working_bytes if seconds_per_byte else 0.0
    return ascent.bound() - seconds_per_byte * spare


def whole_compile(size: Size) -> dict[str, Any]:
    """From meta parameters to the Plan."""
    start, start_cpu = time.perf_counter(), time.process_time()
    with collection_paused():  # as `autopar.compile` does
        program = size.program(size.num_layers)
        traced, traced_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        choose = ChooseShardings(CLUSTER, budget=MemoryBudget.of(DEVICE_MEMORY))
        decision = choose.decide(program)
        plan = Plan.of(choose.apply(program, decision), decision)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "model": size.name, "layers": size.num_layers, "ops": len(plan.strategies), "atoms s": traced, "atoms CPU s": traced_cpu,
        "whole s": time.perf_counter() - start, "whole CPU s": time.process_time() - start_cpu, "peak GB": peak / 1e9,
        "gap %": 100 * decision.gap, "load": os.getloadavg()[0],
    }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.models:
        size = SIZES[name]
        for num_layers in options.layers or [size.num_layers]:
            program = size.program(num_layers)
            for budget in [DEVICE_MEMORY, size.tight] if not options.layers else [DEVICE_MEMORY]:
                yield measure(size, num_layers, budget, program, options.bound, options.highs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--layers", nargs="+", type=int, help="instead of each model's own number")
    parser.add_argument("--bound", action="store_true", help="compare with the bound of the whole problem (minutes)")
    parser.add_argument("--highs", type=float, default=0.0, metavar="SECONDS", help="compare with HiGHS alone, stopped after so long")
    parser.add_argument("--whole", action="store_true", help="measure from meta parameters to the plan")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    found = [whole_compile(SIZES[name]) for name in options.models] if options.whole else list(rows(options))
    for row in found:
        assert row["gap %"] < math.inf
        print_table(row["model"], [row])
    write_json(options.json, {"search": found})


if __name__ == "__main__":
    main()
