"""Pipeline stages placed by price against whole layers counted: how fast is the slowest stage?

    python -m benchmarks.placement                                     four models at full depth; writes benchmarks/results/placement.md
    python -m benchmarks.placement --models gpt2-medium --pp 2 4 --results placement.md

Shapes on meta, priced on H100 of 80 GB in bf16 with Adam, one stage a node of eight and one GPU of it, 1F1B. The rules of others
are whole layers: as many each, as many parameters each (DeepSpeed), as many with embeddings and head counted as one layer each
(torchtitan). On the mixed cluster every second half of the stages runs on devices of half the speed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autopar.compiler import Options, default_passes
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.driver.manager import run_passes
from autopar.errors import PlanError
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.global_.insert_reshards import InsertReshards
from autopar.pipeline.placement import Devices, Line, StagePlacement, Value, place, placed_at
from autopar.pipeline.placement_units import line_of
from autopar.testing.placement_rules import equal_layers, equal_parameters, weighted_layers
from benchmarks.planning import GPT2_MEDIUM, LLAMA_3_8B, Shape, default_dtype
from benchmarks.reporting import machine, print_table

CLUSTER = Cluster.named("8xH100")
CAPACITY_BYTES = 80e9
RESULTS = Path(__file__).parent / "results" / "placement.md"
# The module path of a layer: `model.layers.3` of `model.layers.3.mlp.down_proj`.
_LAYER = re.compile(r"(?:.*?\.)??(?:layers|h)\.\d+(?=[. ])")
_MIB = 1 << 20
MANY = 9000


@dataclass(frozen=True)
class Case:
    """A model and one microbatch for it."""

    name: str
    microbatch: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]

    def program(self) -> Program:
        """GLOBAL with reshards, on one device."""
        with default_dtype(torch.bfloat16), torch.device("meta"):
            model = self.model()
        forward = capture(model, (), self.batch(), virtual_mesh(dp=1), None, {0: 0, 1: 0})
        passes = default_passes(Options(CLUSTER), True, None)
        last = next(number for number, each in enumerate(passes) if isinstance(each, InsertReshards))
        return run_passes(forward, passes[: last + 1])


def _tokens(num_sequences: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(num_sequences, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _images(number: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(number, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.zeros(number, dtype=torch.int64)}


def _of_shape(shape: Shape, num_sequences: int) -> Case:
    microbatch = f"{num_sequences} × {shape.length} tokens"
    return Case(shape.name, microbatch, lambda: shape.build(shape, shape.num_layers), lambda: _tokens(num_sequences, shape.length))


def _bart_large() -> nn.Module:
    config = transformers.BartConfig(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, use_cache=False)
    return transformers.BartForConditionalGeneration(config)


def _resnet_50() -> nn.Module:
    config = transformers.ResNetConfig()
    config.num_labels = 1000
    return transformers.ResNetForImageClassification(config)


CASES = {
    case.name: case
    for case in (
        _of_shape(LLAMA_3_8B, 1),
        _of_shape(GPT2_MEDIUM, 8),
        Case("bart-large", "8 × 1024 tokens", _bart_large, lambda: _tokens(8, 1024)),
        Case("resnet-50", "64 images", _resnet_50, lambda: _images(64)),
    )
}


def layer_boundaries(line: Line) -> list[int]:
    """The first unit of every layer, and the first one behind the last layer, by the module paths in the units' names."""
    layers = [match.group() if (match := _LAYER.match(unit.name)) else "" for unit in line.units]
    firsts = {layer: number for number, layer in reversed(list(enumerate(layers))) if layer}
    return [*sorted(firsts.values()), max(number for number, layer in enumerate(layers) if layer) + 1]


def devices(num_stages: int, speeds: Sequence[float] = ()) -> Devices:
    """A GPU of each of so many nodes."""
    cost = CostModel(CLUSTER, virtual_mesh(pp=num_stages, tp=8))
    latency, whole = (cost.collective("send", ("pp",), size, size).seconds for size in (0, 100 * _MIB))
    return Devices(tuple(speeds) or (1.0,) * num_stages, (CAPACITY_BYTES,) * num_stages, (whole - latency) / (100 * _MIB), latency)


def by_rules(line: Line, on: Devices, live: Sequence[int]) -> dict[str, StagePlacement]:
    """What the rules make of it; those that refuse so many stages are left out."""
    boundaries, number = layer_boundaries(line), on.num_stages
    parameter_bytes = [unit.held_bytes for unit in line.units]
    for shared in line.shared:
        parameter_bytes[shared.units[0]] += shared.bytes
    rules: dict[str, Callable[[], tuple[int, ...]]] = {
        "equal layers": lambda: equal_layers(boundaries, number),
        "equal parameters": lambda: equal_parameters(boundaries, parameter_bytes, number),
        "torchtitan": lambda: weighted_layers(boundaries, number),
    }
    found: dict[str, StagePlacement] = {}
    for name, rule in rules.items():
        try:
            found[name] = placed_at(line, on, live, rule())
        except PlanError:
            continue
    return found


def compare(case: Case, line: Line, num_stages: int) -> tuple[dict[str, Any], dict[str, Any], StagePlacement]:
    """Equal devices against the rules; two speeds against equal layers; and the placement on equal devices."""
    live = [num_stages - stage for stage in range(num_stages)]
    even, half = devices(num_stages), num_stages // 2
    mixed = devices(num_stages, (1.0,) * half + (0.5,) * (num_stages - half))
    start = time.process_time()
    found = place(line, even, live)
    seconds = time.process_time() - start
    rules = by_rules(line, even, live)
    best = min(rules, key=lambda name: rules[name].slowest_seconds)
    row: dict[str, Any] = {"model": case.name, "pp": num_stages, "units": len(line.units), "placed ms": 1e3 * found.slowest_seconds}
    row |= {f"{name} ms": 1e3 * rules[name].slowest_seconds if name in rules else "refuses" for name in _RULES}
    row |= {"best rule / placed": rules[best].slowest_seconds / found.slowest_seconds}
    row |= {"ideal / placed": _ideal(line, even) / found.slowest_seconds, "search CPU s": seconds}
    uneven, counted = place(line, mixed, live), by_rules(line, mixed, live)["equal layers"]
    two = {
        "model": case.name,
        "pp": num_stages,
        "placed ms": 1e3 * uneven.slowest_seconds,
        "equal layers ms": 1e3 * counted.slowest_seconds,
    }
    two |= {"equal layers / placed": counted.slowest_seconds / uneven.slowest_seconds}
    return row, two | {"ideal / placed": _ideal(line, mixed) / uneven.slowest_seconds}, found


_RULES = ("equal layers", "equal parameters", "torchtitan")


def measure_long(case: Case, line: Line) -> dict[str, Any]:
    """The model behind itself until there are so many units, on sixteen stages."""
    times, step = -(-MANY // len(line.units)), len(line.units)
    values = [
        value._replace(producer=value.producer + shift, readers=tuple(reader + shift for reader in value.readers))
        for shift in range(0, times * step, step)
        for value in line.values
    ]
    links = [Value(shift - 1, (shift,), line.values[0].bytes) for shift in range(step, times * step, step)]
    whole = Line(line.units * times, (*values, *links))
    start = time.process_time()
    found = place(whole, replace(devices(16), capacity_bytes=(times * CAPACITY_BYTES,) * 16), range(16, 0, -1))
    seconds = time.process_time() - start
    share = sum(stage.communication_seconds for stage in found.stages) / sum(found.seconds)
    return {"model": case.name, "units": len(whole.units), "pp": 16, "sends %": 100 * share, "search CPU s": seconds}


def _ideal(line: Line, on: Devices) -> float:
    """Compute alone, divided without remainder."""
    return sum(unit.forward_seconds + unit.backward_seconds for unit in line.units) / sum(on.speeds)


def _markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in row.values())} |"


def report(
    cases: Sequence[Case],
    rows: Sequence[dict[str, Any]],
    two: Sequence[dict[str, Any]],
    long: Sequence[dict[str, Any]],
    shown: Sequence[str],
) -> str:
    where = machine()
    microbatches = ", ".join(f"{case.name}: {case.microbatch}" for case in cases)
    lines = [
        "# Placement of pipeline stages",
        "",
        f"{where['date']}, `python -m benchmarks.placement`, torch {where['torch']}; the searches on {where['cores']} cores with a load of",
        f"{where['load']}. Predicted seconds of forward and backward of one",
        "microbatch on the slowest stage, sends included; every stage is a GPU of another node of H100s. bf16, Adam, 80 GB, 1F1B.",
        f"A microbatch: {microbatches}. Ideal is compute alone, divided evenly.",
        "",
        *_markdown(rows),
        "",
        "Half of the stages, the later ones, on devices of half the speed:",
        "",
        *_markdown(two),
        "",
        "How long the search takes on lines of 9,000 units and more, each model several times behind itself:",
        "",
        *_markdown(long),
    ]
    for each in shown:
        lines += ["", "```", each, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pp", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--results", type=Path, default=RESULTS, help="write the tables here")
    options = parser.parse_args()
    cases = [CASES[name] for name in options.models]
    rows, two, long, shown = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for case in cases:
        program = case.program()
        line = line_of(program, CostModel(CLUSTER, program.mesh)).line
        compared = [compare(case, line, num_stages) for num_stages in options.pp]
        rows += [row for row, _, _ in compared]
        two += [row for _, row, _ in compared]
        long += [measure_long(case, line)]
        shown.append(f"{case.name}, pp = {options.pp[-1]}\n{compared[-1][2]}")
        print_table(case.name, rows[-len(options.pp) :])
    print_table("two speeds", two)
    print_table("long lines", long)
    options.results.write_text(report(cases, rows, two, long, shown), encoding="utf-8")


if __name__ == "__main__":
    main()
