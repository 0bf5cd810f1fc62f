"""What is asked when a plan is searched for, and the plans that could be an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from autopar.cost.hardware.cluster import Cluster
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.offload import HOST_BYTES, NOTHING
from autopar.foresight.price import Prices
from autopar.foresight.step import RECOMPUTE, StepPlan
from autopar.foresight.work import ModelWork
from autopar.ir.mesh import Mesh
from autopar.ir.zero import LEVELS

# Larger microbatches than these are looked at only as the whole share: products are at their peak long before.
MAX_MICROBATCH = 64
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved")
Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Question:
    """Which plan trains this model fastest on so many devices, each with so much memory?

    capacity_bytes    of a device, and `host_bytes` of the host for each device
    works             what a rank does for a microbatch, by the size of tp
    tokens_per_sample 0 where samples have no tokens
    num_microbatches  None where any number will do; `schedules`, `recomputations`, `levels` of ZeRO and `offloads` are those to look at
    """

    works: Mapping[int, ModelWork]
    cluster: Cluster
    num_devices: int
    global_batch: int
    capacity_bytes: float
    profile: SoftwareProfile
    tokens_per_sample: int = 0
    num_microbatches: int | None = None
    schedules: tuple[str, ...] = SCHEDULES
    recomputations: tuple[str, ...] = tuple(RECOMPUTE)
    levels: tuple[int, ...] = tuple(LEVELS)
    offloads: tuple[tuple[str, ...], ...] = (NOTHING,)
    host_bytes: float = HOST_BYTES

    @property
    def work(self) -> ModelWork:
        """One of them, for what all have alike."""
        return next(iter(self.works.values()))

    def factorisations(self) -> Iterator[Axes]:
        """Every pp × dp × tp of all devices."""
        for tp in sorted(self.works):
            for pp in divisors(self.num_devices // tp) if self.num_devices % tp == 0 else ():
                yield (("pp", pp), ("dp", self.num_devices // (tp * pp)), ("tp", tp))

    def problem_of(self, axes: Axes) -> str:
        """Why a mesh has no plan, whatever the memory; "" where it has."""
        sizes, batch = dict(axes), self.global_batch
        pp, dp = sizes["pp"], sizes["dp"]
        if pp > max(self.work.num_layers, 1):
            return f"more stages than the {self.work.num_layers} layers of the model"
        if batch % dp:
            return f"its dp does not divide a batch of {batch}; take a multiple of dp"
        if self.num_microbatches is not None and batch // dp % self.num_microbatches:
            return f"{self.num_microbatches} microbatches do not divide its share of a batch of {batch}"
        if self.num_microbatches not in (None, 1) and self.work.mixes_samples:
            return f"the model mixes samples, and computes something else in {self.num_microbatches} microbatches"
        return "" if any(True for _ in self.plans(axes)) else f"no schedule of {', '.join(self.schedules)} fits its stages"

    def meshes(self) -> Iterator[Axes]:
        """Those that have plans."""
        return (axes for axes in self.factorisations() if not self.problem_of(axes))

    def prices(self, axes: Axes) -> Prices:
        return Prices(
            self.cluster, Mesh(axes), Constants.of(self.cluster, self.work.itemsize), self.profile, self.works[dict(axes)["tp"]].tp_parts
        )

    def plans(self, axes: Axes) -> Iterator[StepPlan]:
        """All that a mesh can run, without ZeRO."""
        sizes = dict(axes)
        share = self.global_batch // sizes["dp"]
        for moved, number, recompute in product(self.offloads, self._numbers(share), self.recomputations):
            for schedule, chunks in self._schedules(sizes["pp"], number):
                yield StepPlan(share // number, number, sizes["dp"], sizes["pp"], schedule, chunks, recompute, offload=moved)

    def _numbers(self, share: int) -> list[int]:
        """Of microbatches of a replica's share of the batch."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        if self.work.mixes_samples:
            return [1]
        return [number for number in divisors(share) if share // number <= MAX_MICROBATCH or number == 1]

    def _schedules(self, pp: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
        for schedule in self.schedules if pp > 1 else ("1f1b",):
            if schedule == "interleaved":
                most = self.work.num_layers // pp if num_microbatches % pp == 0 else 0
                yield from ((schedule, chunks) for chunks in divisors(most) if chunks > 1)
            elif schedule != "zb-v" or 2 * pp <= self.work.num_layers:
                yield schedule, 1


def divisors(number: int) -> list[int]:
    """Those of a positive number, ascending; none of 0."""
    return [each for each in range(1, number + 1) if number % each == 0]
