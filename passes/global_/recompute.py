"""Which values of the forward are kept for the backward, and which are computed again."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.ir.keys import RECOMPUTED
from autopar.ir.program import Program
from autopar.plans.json import Json
from autopar.plans.keys import node_keys
from autopar.recompute.again import computed_again
from autopar.recompute.choices import REGION, fixed, layers, named
from autopar.recompute.decision import RecomputeDecision
from autopar.recompute.fit import Fit
from autopar.recompute.segments import segments

logger = logging.getLogger("autopar")
_REASONS = {
    "full": "full: each layer is computed again from what it reads",
    "selective": "selective: in each layer all but what contractions and attentions make",
}


class WrittenRecompute(TypedDict):
    """`RecomputeDecision` as JSON: calls by `node_keys`; None for bytes that nobody counted."""

    nodes: list[str]
    reason: str
    fits: bool
    peak_bytes: float | None


@dataclass(frozen=True)
class Recompute:
    """Copy calls of the forward into the backward, in front of what reads them there, so that less is kept in between.

    mode     "none", "full", "selective" or "auto", see `autopar.recompute.choices`
    cluster  what computing again is priced on, under "auto" within `budget`, see `autopar.recompute.fit`
    planned  the calls of a plan, by `node_keys` with reshards: taken under "auto"

    Reads: PHASE, STAGE, STRATEGY, SHARDING, `save` nodes of a GLOBAL program with its reshards. Writes: copies with RECOMPUTED, `save`
    nodes. Ensures: the backward reads of the forward `save` nodes alone, and copies of what `decide` names.
    """

    mode: str = "auto"
    cluster: Cluster = field(default_factory=Cluster.ideal)
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    planned: Sequence[str] = ()
    name: str = "recompute"

    def decide(self, program: Program) -> RecomputeDecision:
        num_regions = len({node.meta[REGION] for node in program.graph.nodes if REGION in node.meta})
        if self.mode == "none":
            ignored = f'recompute="none": the model\'s {num_regions} regions under torch.utils.checkpoint are kept' if num_regions else ""
            if ignored:
                logger.warning(ignored)
            return RecomputeDecision(reason=ignored)
        if self.mode in ("full", "selective"):
            if not layers(program):
                return RecomputeDecision(reason=f'recompute="{self.mode}": no module has a number in its path, so there are no layers')
            return RecomputeDecision(named(self.mode, program), _REASONS[self.mode])
        if self.planned:
            wanted, once = set(self.planned), fixed(program)
            keys = node_keys(program, with_reshards=True)
            return RecomputeDecision(
                frozenset(node.name for node, key in keys.items() if key in wanted and node not in once), "by the plan"
            )
        asked = named("auto", program)
        reason = f"the model's {num_regions} checkpointed regions, each from what it reads" if num_regions else ""
        if not self.budget.is_finite or not program.signature.outputs_of("gradient"):
            return RecomputeDecision(asked, reason)
        cost = CostModel(self.cluster, program.mesh, self.budget.optimizer)
        return Fit(program, cost, segments(program), self.budget).decide(asked, reason)

    def apply(self, program: Program, decision: RecomputeDecision) -> Program:
        return computed_again(program, decision.nodes) if decision.nodes else program

    def written(self, program: Program, decision: RecomputeDecision) -> dict[str, Json]:
        keys = {node.name: key for node, key in node_keys(program, with_reshards=True).items()}
        # The numbers, too: what is tried next under a budget follows from them, on all ranks alike.
        counted = {"fits": decision.fits, "peak_bytes": None if math.isinf(decision.peak_bytes) else decision.peak_bytes}
        return {"nodes": sorted(keys[name] for name in decision.nodes), "reason": decision.reason, **counted}

    def read(self, program: Program, value: WrittenRecompute) -> RecomputeDecision:
        wanted, peak = set(value["nodes"]), value["peak_bytes"]
        names = frozenset(node.name for node, key in node_keys(program, with_reshards=True).items() if key in wanted)
        return RecomputeDecision(names, value["reason"], value["fits"], math.inf if peak is None else peak)


def recomputed_keys(before: Program, after: Program) -> tuple[str, ...]:
    """The calls of `before` that `after` does twice, as a plan names them."""
    keys = {node.name: key for node, key in node_keys(before, with_reshards=True).items()}
    names = dict.fromkeys(RECOMPUTED[node] for node in after.graph.nodes if node in RECOMPUTED)
    return tuple(keys[name] for name in names if name in keys)
