"""Which ops of our own the zoo's models get with attention written out, and that they stay exact and as split as without.

    python -m benchmarks.zoo_kernels                                    all models on tp2 and tp4
    python -m benchmarks.zoo_kernels llama t5 --mesh tp2
    python -m benchmarks.zoo_kernels --docs docs/kernels.md             the same as a table

Models are built as in `benchmarks/zoo.py`, with transformers' attention implementation "eager" where they have one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from autopar import Cluster, virtual_mesh
from autopar.ir.fusion import FusionDecision, FusionSite
from benchmarks.zoo import TOLERANCE, ZOO

MESHES = {"tp2": {"tp": 2}, "tp4": {"tp": 4}}
KINDS = ("attention", "norm", "gate", "rotary", "cross entropy")


@dataclass(frozen=True)
class Outcome:
    """One model on one mesh: what became an op of ours and what did not, by kind; the worst error; FLOPs split with and without."""

    name: str
    mesh: str
    seconds: float
    fused: dict[str, int]
    left: tuple[str, ...]
    error: float
    flops_split: float
    plain_flops_split: float

    @property
    def is_sound(self) -> bool:
        return self.error <= TOLERANCE and self.flops_split >= self.plain_flops_split - 1e-3

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {kind}" for kind, number in self.fused.items())
        state = "exact" if self.error <= TOLERANCE else "WRONG"
        split = f"flops_split {self.flops_split:.3f} (plain {self.plain_flops_split:.3f})"
        return "\n    ".join(
            (f"{self.name:12} {self.mesh:4} {self.seconds:6.1f} s  {state} {self.error:8.1e}  {split}  {counts}", *self.left)
        )


def kind_of(found: FusionSite) -> str:
    return next((kind for kind in KINDS if kind in found.what), found.what)


def outcome(name: str, mesh: str) -> Outcome:
    """Compile one model twice for one virtual mesh, with ops of our own and without, and compare the first with the original."""
    start = time.perf_counter()
    flops: list[float] = []
    report: Any = None
    found: list[FusionSite] = []
    for kernels in ("off", "auto"):
        torch.manual_seed(0)
        case = ZOO[name]()
        set_attention: Any = getattr(case.model, "set_attn_implementation", None)
        if set_attention is not None:
            set_attention("eager")
        batch: dict[str, Any] = dict(case.batch)
        parallel = autopar.compile(
            case.model, virtual_mesh(**MESHES[mesh]), example_inputs=batch, backend="eager", cluster=Cluster.ideal(), kernels=kernels
        )
        flops.append(parallel.summary()["flops_split"])
        if kernels == "auto":
            report = parallel.verify(promote=True, **batch)
            found = [each for step in parallel.compiled.steps if isinstance(step.decision, FusionDecision) for each in step.decision.found]
    fused = Counter(kind_of(each) for each in found if each.fused)
    # That logits stay whole without a budget is no miss.
    left = Counter(str(each) for each in found if not each.fused and "projection" not in each.what)
    lines = tuple(f"{text} × {number}" if number > 1 else text for text, number in left.items())
    return Outcome(name, mesh, time.perf_counter() - start, dict(fused), lines, report.worst, flops[1], flops[0])


def document(found: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown page, one row a model."""
    by_model: dict[str, list[Outcome]] = {}
    for each in found:
        by_model.setdefault(each.name, []).append(each)
    sound = sum(all(each.is_sound for each in model) for model in by_model.values())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        "# Ops of our own in the zoo",
        "",
        f'Attention written out (`attn_implementation="eager"`), `kernels="auto"`, on {" and ".join(MESHES)}: {sound} of {len(by_model)}',
        f"models are exact (within {TOLERANCE:.0e} of the original, in float64) and split no less of their FLOPs than without these ops.",
        "What is left in plain ops is below.",
        "",
        f"Written by `python -m benchmarks.zoo_kernels --docs docs/kernels.md`; {versions}.",
        "",
        f"| model | {' | '.join(KINDS)} | left | worst error | `flops_split` {', '.join(MESHES)} (plain) |",
        "|---" * (len(KINDS) + 4) + "|",
    ]
    for name, model in by_model.items():
        first = model[0]
        counts = " | ".join(str(first.fused.get(kind, "")) for kind in KINDS)
        split = ", ".join(f"{each.flops_split:.3f} ({each.plain_flops_split:.3f})" for each in model)
        lines.append(f"| {name} | {counts} | {len(first.left) or ''} | {max(each.error for each in model):.1e} | {split} |")
    left = [f"- {name}: {text}" for name, model in by_model.items() for text in model[0].left]
    return "\n".join([*lines, "", "## Left in plain ops", "", *(left or ["Nothing."])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="default: both")
    parser.add_argument("--docs", type=Path, help="write the table to this file")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found: list[Outcome] = []
    for name in options.models or list(ZOO):
        for mesh in options.mesh or list(MESHES):
            found.append(outcome(name, mesh))
            print(found[-1], flush=True)
    if options.docs:
        options.docs.write_text(document(found))


if __name__ == "__main__":
    main()
