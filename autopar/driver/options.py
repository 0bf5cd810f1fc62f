"""The options of `autopar.compile`, as one value."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from torch import nn

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.errors import AutoparError
from autopar.ir.actions import PipelineSchedule
from autopar.ir.freedom import Freedom
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import MixedPrecision
from autopar.ir.shares import UnequalShares
from autopar.ir.zero import ZeRO
from autopar.partition.whole_batch import Mixing, Statistics
from autopar.pipeline.weight_versions import WeightVersions
from autopar.plans.plan import Pins, Plan


@dataclass(frozen=True)
class BatchOfFirst:
    """Dim 0 of every input that is as long there as the first one, in the order of forward's parameters: what they are called, and in which
    order a call has them, says nothing. Keywords that forward does not name follow."""

    parameters: tuple[str, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> BatchOfFirst:
        return BatchOfFirst(tuple(inspect.signature(model.forward).parameters))

    def first(self, names: Iterable[str]) -> str | None:
        """Of inputs by name, positional ones in front."""
        return min(names, key=self._place, default=None)

    def _place(self, name: str) -> int:
        argument = re.split(r"[\[.]", name, maxsplit=1)[0]
        if argument not in self.parameters:
            return -1 if argument == "args" else len(self.parameters)
        return self.parameters.index(argument)


# A dim for all inputs, or by name (None for an input without one); else by their lengths.
BatchDims = int | Mapping[str, int | None] | BatchOfFirst

_KNOWN = {
    "outputs": (None, "loss", "all"),
    "kernels": ("auto", "triton", "aten", "off"),
    "microbatch_statistics": (None, "own"),
    "recompute": ("auto", "none", "full", "selective"),
}
_WORDS = {
    "outputs": '"loss" or "all"',
    "kernels": '"auto", "triton", "aten" or "off"',
    "microbatch_statistics": '"own", or leave it out',
    "recompute": '"auto", "none", "full" or "selective"',
}


def refuse_no_number(num_microbatches: object) -> None:
    """Raises `AutoparError` for what is neither None nor 1 or more."""
    is_number = isinstance(num_microbatches, int) and not isinstance(num_microbatches, bool) and num_microbatches >= 1
    if num_microbatches is not None and not is_number:
        raise AutoparError(f"num_microbatches={num_microbatches!r} is no number of microbatches: pass 1 or more, or leave it out")


@dataclass(frozen=True)
class Options:
    """What the user asked of a compile, as far as passes need to know; `autopar.compile` says what each means.

    `device` is the type of device that the model is on, `is_real` tells processes from virtual ranks, `mixing` is what turned out to mix
    microbatches in an earlier try, `updates` when `train_step` updates
    parameters, `shares` are those of ranks that pass unequal ones of the batch, `limit` is what the whole step may take where the search
    is asked for less than that, or for anything, `fit` what recomputation alone is to fit the step into where the search is asked for
    nothing. Raises `AutoparError` for a value that an option does not have.
    """

    cluster: Cluster
    _: KW_ONLY
    outputs: str | None = None
    batch_dims: BatchDims = BatchOfFirst()
    plan: Plan | None = None
    pins: Pins | Plan | None = None
    search_timeout: float | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    freedom: Freedom = Freedom()
    num_microbatches: int | None = None
    microbatch_statistics: Statistics = None
    mixing: tuple[Mixing, ...] = ()
    schedule: str | PipelineSchedule | None = None
    device: str = "cpu"
    is_real: bool = False
    kernels: str = "auto"
    updates: Literal["bucket", "end"] | None = None
    precision: MixedPrecision | None = None
    shares: UnequalShares | None = None
    recompute: str = "auto"
    versions: WeightVersions | None = None
    offload: Offload | None = None
    limit: MemoryBudget | None = None
    fit: MemoryBudget | None = None
    collective_chunks: str | int = "auto"

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise AutoparError(f"{name}={getattr(self, name)!r} is unknown; use {_WORDS[name]}")
        refuse_no_number(self.num_microbatches)
        chunks = self.collective_chunks
        if chunks not in ("auto", "off") and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 2):
            raise AutoparError(f'collective_chunks={chunks!r} is unknown; use "auto", "off" or a number of pieces, 2 or more')

    def asked(self) -> dict[str, str]:
        """What all ranks must have asked for alike, as text by the option's name: the plan is that of rank 0, and another's would be lost.

        Budgets are left out, which may be a share of each rank's own device, and plans and pins, which come from one file as a rule.
        """
        away = self.offload  # its folder is a machine's own
        dims = dict(sorted(self.batch_dims.items())) if isinstance(self.batch_dims, Mapping) else self.batch_dims
        return {
            "outputs": str(self.outputs),
            "batch_dims": "None" if isinstance(dims, BatchOfFirst) else str(dims),
            "zero": "None" if self.freedom.zero is None else str(self.freedom.zero).removeprefix("zero="),
            "num_microbatches": str(self.num_microbatches),
            "microbatch_statistics": str(self.microbatch_statistics),
            "schedule": type(self.schedule).__name__ if isinstance(self.schedule, PipelineSchedule) else str(self.schedule),
            "kernels": self.kernels,
            "precision": str(self.precision),
            "recompute": self.recompute,
            "offload": str(away and {"activations": away.activations, "optimizer": away.optimizer, "parameters": away.parameters}),
            "collective_chunks": str(self.collective_chunks),
            "train_step's updates": f"{self.updates}, {self.versions}",
        }

    @property
    def moves_activations(self) -> bool:
        """Whether what the backward reads may lie elsewhere than on the device."""
        return self.offload is not None and self.offload.activations is not None

    def by_name(self, mesh: Mesh, is_placed: bool) -> tuple[Options, ...]:
        """What `zero=` and `recompute=` may say of `mesh` where the user left that open, without a budget for the search: first what keeps
        all that it may; then, by level of ZeRO from the highest, what is computed again so that the step fits, and all that may be. Where
        parameters lie is fixed if it `is_placed`."""
        is_free = self.freedom.shards_parameters and self.freedom.zero is None and not is_placed
        levels = (3, 2, 1, 0) if mesh.num_shares > 1 else (0,)
        modes = ("auto", "full") if self.recompute == "auto" else (self.recompute,)
        freedoms = [
            replace(self.freedom, shards_parameters=level > 0, zero=ZeRO(level) if level else None) for level in (levels if is_free else ())
        ] or [self.freedom]
        unbound = replace(self, budget=replace(self.budget, capacity_bytes=math.inf), limit=self.budget)
        first = replace(unbound, freedom=freedoms[-1])
        return first, *(replace(unbound, freedom=freedom, recompute=mode, fit=self.budget) for freedom in freedoms for mode in modes)

    @property
    def recompute_budget(self) -> MemoryBudget:
        """What recomputation is to fit the step into."""
        return self.fit or self.budget

    @property
    def frees_early(self) -> bool:
        """Whether memory is so short that the backward is cut for it: there is a budget, or somebody asked to compute again."""
        is_planned = self.plan is not None and bool(self.plan.recomputed)
        return self.recompute_budget.is_finite or self.recompute in ("full", "selective") or (is_planned and self.recompute != "none")

    @property
    def is_order_free(self) -> bool:
        """Whether the order of a pipeline is to be found by cost."""
        return self.schedule == "auto"

    @property
    def is_number_asked(self) -> bool:
        """Whether the user gave the number of microbatches, or a schedule drawn for one."""
        return self.num_microbatches is not None or isinstance(self.schedule, PipelineSchedule)

    @property
    def fuses_attention(self) -> bool:
        """Whether attention written in plain ops becomes an op of ours."""
        return self.kernels != "off"

    @property
    def fuses_losses(self) -> bool:
        """Whether cross entropy becomes an op of ours."""
        return self.kernels not in ("off", "aten")

    @property
    def writes_rows(self) -> bool:
        """Whether norms, gates, rotary embeddings and dropout become ops of ours: a CPU's compiler joins plain ops with others."""
        return self.kernels == "triton" or (self.kernels == "auto" and self.cluster.device.name != "cpu")

    @property
    def chooses_kernels(self) -> bool:
        """Whether there is a choice between kernels: a laptop that plans for a GPU makes it, too."""
        device = self.cluster.device.name
        return self.device == "cuda" or device not in ("cpu", "tpu", Cluster.ideal().device.name)

    @property
    def pinned_modules(self) -> tuple[str, ...]:
        """Patterns of what is pinned, and the modules that a plan had pinned."""
        pins = self.pins if isinstance(self.pins, Mapping) else {}
        return (*(self.plan.pinned if self.plan is not None else ()), *pins)
