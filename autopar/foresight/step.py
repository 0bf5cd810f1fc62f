"""One step of a plan: from the work of the blocks to seconds by part and bytes by kind and stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from autopar.cost.hardware.links import CommunicationKind
from autopar.foresight.clock import Times, times
from autopar.foresight.offload import NOTHING, host_copy_seconds, host_update_seconds, share_on_host
from autopar.foresight.partition import Stages, cut
from autopar.foresight.prediction import Prediction, StageMemory, StageSeconds
from autopar.foresight.price import Prices, Seconds
from autopar.foresight.work import Block, ModelWork
from autopar.ir.actions import PipelineSchedule, chain
from autopar.pipeline.auto_schedule import auto_schedule
from autopar.pipeline.cost import EdgeCost, PipelineCost, StageCost
from autopar.pipeline.order import live_microbatches
from autopar.pipeline.schedules import generate

# What a layer keeps of a forward.
RECOMPUTE = {"none": "saved", "selective": "saved_outside_core", "full": "inputs"}


@dataclass(frozen=True)
class StepPlan:
    """What a step runs: `microbatch` samples at a time, `num_microbatches` times, on each of the `dp` replicas.

    `schedule` is a name that `autopar.compile` knows, or a `PipelineSchedule`; "auto" is searched for under the memory of `live_limit`
    microbatches a rank. `num_chunks` stages lie on a rank of an interleaved one.
    `offload` has what lies on the host: "optimizer", its state, and "activations", `offloaded_share` of what forwards keep.
    """

    microbatch: int
    num_microbatches: int
    dp: int = 1
    pp: int = 1
    schedule: str | PipelineSchedule = "1f1b"
    num_chunks: int = 1
    recompute: str = "none"
    zero: int = 0
    live_limit: float | None = None
    offload: tuple[str, ...] = NOTHING
    offloaded_share: float = 1.0

    @property
    def moves_activations(self) -> bool:
        return "activations" in self.offload

    @property
    def updates_on_host(self) -> bool:
        return "optimizer" in self.offload

    @property
    def shares_on_host(self) -> dict[str, float]:
        """By kind."""
        return {kind: self.offloaded_share if kind == "activations" else 1.0 for kind in self.offload}


@dataclass(frozen=True)
class Step:
    work: ModelWork
    plan: StepPlan
    prices: Prices

    @property
    def num_stages(self) -> int:
        given = self.plan.schedule
        if isinstance(given, PipelineSchedule):
            return given.num_stages
        return self.plan.pp * (2 if given == "zb-v" else self.plan.num_chunks)

    @cached_property
    def stages(self) -> Stages:
        return cut(self.work, self.num_stages, self.prices.profile.partition)

    def seconds(self, part: str, stage: int) -> Seconds:
        """Of one microbatch: "forward", "input_gradient", "weight_gradient", or "again", what is recomputed."""
        samples = self.plan.microbatch
        total = Seconds()
        for block in self.stages[stage]:
            if part != "again":
                total += self.of(block, part, samples)
            elif self.plan.recompute == "full" and block.is_layer:
                total += self.of(block, "forward", samples)
            elif self.plan.recompute == "selective":
                total += self.of(block, "core", samples)
        return total

    def hidden_seconds(self, stage: int) -> float:
        """What of one microbatch's collectives runs beside products of an undivided backward."""
        return self.prices.hidden_seconds(self.seconds("input_gradient", stage), self.seconds("weight_gradient", stage))

    def of(self, block: Block, part: str, samples: int) -> Seconds:
        return self.prices.part(getattr(block, part), samples)

    def stage_cost(self, stage: int) -> StageCost:
        again = self.seconds("again", stage)
        forward, weight = self.seconds("forward", stage), self.seconds("weight_gradient", stage)
        gradient = self.seconds("input_gradient", stage) + again
        # The CPU runs ahead of the device: what it is late in one part it may have gained in another of the microbatch.
        whole = forward + gradient + weight
        stretch = whole.total / whole.device if whole.device else 1.0
        hidden = self.hidden_seconds(stage)
        backward = max(whole.device - hidden, whole.host) - stretch * forward.device if hidden else None
        copies = host_copy_seconds(self.prices.cluster, self.moved_bytes(stage))
        if copies:  # an undivided backward hides them behind both gradients
            backward = max(stretch * gradient.device + stretch * weight.device if backward is None else backward, copies)
        return StageCost(
            max(stretch * forward.device, copies),
            max(stretch * gradient.device, copies),
            stretch * weight.device,
            backward_seconds=backward,
            saved_bytes=self.saved_bytes(stage),
            weight_saved_bytes=0.5 * self.saved_bytes(stage),
        )

    def edge(self, stage: int) -> EdgeCost:
        """From `stage` to the next: what the next one's first block reads of blocks before."""
        following = next((blocks[0] for blocks in self.stages[stage + 1 :] if blocks), None)
        size = following.inputs.of(self.plan.microbatch) if following is not None else 0.0
        return EdgeCost(self.prices.collective("send", ("pp",), size, size), size)

    @cached_property
    def pipeline(self) -> PipelineCost:
        stages = tuple(map(self.stage_cost, range(self.num_stages)))
        return PipelineCost(stages, {edge: self.edge(edge.source) for edge in chain(self.num_stages)})

    @cached_property
    def schedule(self) -> PipelineSchedule:
        plan = self.plan
        if isinstance(plan.schedule, PipelineSchedule):
            return plan.schedule
        if plan.schedule == "auto":
            most = max(stage.saved_bytes for stage in self.pipeline.stages)
            budget = float("inf") if plan.live_limit is None else plan.live_limit * most * (1 + 1e-6)
            return auto_schedule(self.pipeline, plan.num_microbatches, budget_bytes=budget)
        return _drawn(plan.schedule, plan.pp, plan.num_microbatches, plan.num_chunks)[0]

    @cached_property
    def times(self) -> Times:
        seconds = [{kind: stage.seconds(kind) for kind in "FBIW"} for stage in self.pipeline.stages]
        sends = [self.edge(stage).seconds for stage in range(self.num_stages - 1)]
        return times(self.schedule, seconds, sends)

    # ---- once a step

    def parameters(self, stage: int) -> float:
        """Elements that a rank of a stage holds; what several blocks read counts once."""
        sizes: dict[str, float] = {}
        for number, block in enumerate(self.stages[stage]):
            # Equal layers are one object: each has parameters of its own.
            sizes |= {f"{name} {number}" if block.is_layer else name: size for name, size in block.parameters.items()}
        return sum(sizes.values())

    @cached_property
    def counts(self) -> tuple[float, ...]:
        """Parameters of a rank at each place along pp."""
        return tuple(sum(map(self.parameters, self.of_rank(rank))) for rank in range(self.plan.pp))

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, place in enumerate(self.schedule.stages) if place == rank]

    def sum_seconds(self, rank: int) -> float:
        """The sums of a rank's gradients over tp: one collective for all of a kind."""
        sizes: dict[tuple[CommunicationKind, tuple[str, ...]], tuple[float, float]] = {}
        for each in (each for stage in self.of_rank(rank) for block in self.stages[stage] for each in block.gradient_sums):
            before = sizes.get((each.collective, each.axes), (0.0, 0.0))
            sizes[each.collective, each.axes] = before[0] + each.input.fixed, before[1] + each.output.fixed
        return sum(self.prices.collective(kind, axes, *size) for (kind, axes), size in sizes.items())

    def reduction_seconds(self, rank: int) -> float:
        """The sum of a rank's gradients over dp; with ZeRO a reduce-scatter, and a gather of what was updated."""
        count = self.counts[rank]
        profile, dp = self.prices.profile, self.plan.dp
        size = count * profile.reduced_bytes
        if dp == 1:
            return 0.0
        if self.plan.zero == 0:
            return self.prices.collective("all_reduce", ("dp",), size, size)
        updated = count * self.work.itemsize
        # At level 3 the forward and the backward of every microbatch gather anew.
        gathers = 2 * self.plan.num_microbatches if self.plan.zero == 3 else 1
        reduced = self.prices.collective("reduce_scatter", ("dp",), size, size / dp)
        return reduced + gathers * self.prices.collective("all_gather", ("dp",), updated / dp, updated)

    @property
    def overlaps_gradients(self) -> bool:
        when = self.prices.profile.overlaps_gradients
        return when == "always" or (when == "without zero" and self.plan.zero == 0)

    def update_seconds(self, rank: int) -> float:
        """Reads gradient and state, writes parameters and state."""
        return self.seconds_to_update(self.counts[rank])

    def seconds_to_update(self, count: float) -> float:
        """To update `count` parameters of a rank."""
        here = count / (self.plan.dp if self.plan.zero else 1)
        profile, itemsize = self.prices.profile, self.work.itemsize
        passes = here * (profile.gradient_bytes + 2 * profile.state_bytes + itemsize)
        if self.plan.updates_on_host:
            return host_update_seconds(self.prices.cluster, here * profile.reduced_bytes, passes, here * itemsize)
        return passes / self.prices.constants.memory_bandwidth

    # ---- bytes

    def saved_bytes(self, stage: int) -> float:
        """What one microbatch keeps on the device from its forward to its backward."""
        return self.kept_bytes(stage) - self.moved_bytes(stage)

    def moved_bytes(self, stage: int) -> float:
        """What of it lies on the host meanwhile."""
        return self.plan.offloaded_share * self.kept_bytes(stage) if self.plan.moves_activations else 0.0

    def kept_bytes(self, stage: int) -> float:
        """Wherever it lies."""
        samples, kind = self.plan.microbatch, RECOMPUTE[self.plan.recompute]
        kept = sum(getattr(block, kind if block.is_layer else "saved").of(samples) for block in self.stages[stage])
        return kept if self.prices.profile.keeps_gathered else kept - self.gathered_bytes(stage)

    def staging_bytes(self, rank: int) -> float:
        """What is on its way to the host and back, where all that a rank keeps moves."""
        kind = RECOMPUTE[self.plan.recompute]
        blocks = [block for stage in self.of_rank(rank) for block in self.stages[stage]]
        return 2 * max((getattr(each, kind if each.is_layer else "saved").of(self.plan.microbatch) for each in blocks), default=0.0)

    def gathered_bytes(self, stage: int) -> float:
        """What of `saved_bytes` can be gathered again from its parts."""
        is_kept = RECOMPUTE[self.plan.recompute] != "inputs"
        return sum(block.gathered.of(self.plan.microbatch) for block in self.stages[stage] if is_kept or not block.is_layer)

    def memory(self, rank: int, zero: int | None = None) -> StageMemory:
        """At another level of ZeRO than the plan's, where one is given."""
        stages = self.of_rank(rank)
        saved = sum(self.live[stage] * self.saved_bytes(stage) for stage in stages)
        working = 0.0
        if self.plan.recompute == "full":
            layers = [block for stage in stages for block in self.stages[stage] if block.is_layer]
            working = max((block.saved.of(self.plan.microbatch) for block in layers), default=0.0)
        if counted := self.prices.profile.counts_working:
            sizes = (getattr(block, f"{counted}_working") for stage in stages for block in self.stages[stage])
            working += self.plan.microbatch * max(sizes, default=0.0)
        moved = sum(self.live[stage] * self.moved_bytes(stage) for stage in stages)
        found = self.state_memory(self.counts[rank], zero)
        found = replace(found, activations=saved + min(self.staging_bytes(rank), moved), working=working, host=found.host + moved)
        if self.prices.profile.holds_ahead and self.plan.pp == 1:
            room = max(0.0, self.prices.cluster.device.memory_bytes - found.total)
            found = replace(found, working=working + min(room, self.gathered_bytes(0)))
        return found

    def share_that_fits(self, zero: int, capacity: float) -> float:
        """Of what forwards keep, so much on the host makes every rank fit; the plan moves nothing yet. See `share_on_host`."""
        held = (self.memory(rank, zero) for rank in range(self.plan.pp))
        totals = ((each.total, each.activations, self.staging_bytes(rank)) for rank, each in enumerate(held))
        return share_on_host(totals, capacity)

    def peak_bytes(self, zero: int) -> float:
        """Of the rank that holds most."""
        return max(self.memory(rank, zero).total for rank in range(self.plan.pp))

    def state_memory(self, count: float, zero: int | None = None) -> StageMemory:
        """What so many parameters of a rank take before a step."""
        profile, dp = self.prices.profile, self.plan.dp
        level = self.plan.zero if zero is None else zero
        state = count * profile.state_bytes / (dp if level else 1)
        return StageMemory(
            parameters=count * self.work.itemsize / (dp if level == 3 else 1),
            gradients=count * (profile.gradient_bytes / (dp if level >= 2 else 1) + (profile.bucket_bytes if dp > 1 else 0.0)),
            optimizer_state=0.0 if self.plan.updates_on_host else state,
            activations=0.0,
            host=state if self.plan.updates_on_host else 0.0,
        )

    @cached_property
    def live(self) -> tuple[int, ...]:
        plan = self.plan
        if isinstance(plan.schedule, PipelineSchedule) or plan.schedule == "auto":
            return live_microbatches(self.schedule)
        return _drawn(plan.schedule, plan.pp, plan.num_microbatches, plan.num_chunks)[1]

    def with_zero(self, level: int) -> Step:
        """The same pipeline, cut, drawn and timed once."""
        other = replace(self, plan=replace(self.plan, zero=level))
        other.__dict__.update(
            stages=self.stages, pipeline=self.pipeline, schedule=self.schedule, times=self.times, live=self.live, counts=self.counts,
            stage_seconds=self.stage_seconds,
        )  # fmt: skip
        return other

    def prediction(self) -> Prediction:
        plan = self.plan
        times = self.times
        pipeline_seconds = max(times.span_seconds) if plan.pp > 1 else times.step_seconds
        ranks = range(plan.pp)
        reduction = max(map(self.reduction_seconds, ranks))
        if self.overlaps_gradients:
            last = max(stage.seconds("B") for stage in self.pipeline.stages)
            reduction = max(0.0, reduction - last)
        reduction += max(map(self.sum_seconds, ranks))
        update = max(map(self.update_seconds, ranks))
        slowest = max(ranks, key=lambda rank: times.busy_seconds[rank])
        parts = Seconds()
        for stage in self.of_rank(slowest):
            for name in ("forward", "again", "input_gradient", "weight_gradient"):
                parts += self.seconds(name, stage)
        number = plan.num_microbatches
        busy = times.busy_seconds[slowest]
        hidden = sum(self.hidden_seconds(action.stage) for action in self.schedule.orders[slowest] if action.kind == "B")
        copies = self.copy_seconds(slowest)
        seconds = {
            "products": parts.products * number,
            "memory": parts.traffic * number,
            "tensor_parallel": parts.collectives * number - hidden,
            "launches": _above_rounding(busy - copies - parts.device * number + hidden, busy),
            "copies": copies,
            "bubble": pipeline_seconds - busy,
            "gradients": reduction,
            "update": update,
            "nodes": self.prices.slowest_node_seconds(),
        }
        return Prediction(
            mesh=dict(self.prices.mesh.axes),
            schedule=self.schedule.name,
            num_microbatches=number,
            seconds=seconds,
            memory=tuple(map(self.memory, ranks)),
            capacity_bytes=self.prices.cluster.device.memory_bytes,
            flops=self.model_flops(),
            samples=plan.microbatch * number * plan.dp,
            peak_flops=self.prices.constants.peak_flops,
            stages=self.stage_seconds,
        )

    def copy_seconds(self, rank: int) -> float:
        """What the actions of a rank take longer, in a step, because of copies to the host and back."""
        if not self.plan.moves_activations:
            return 0.0
        now, kept = self.pipeline.stages, self.without_copies.pipeline.stages
        return sum(now[at.stage].seconds(at.kind) - kept[at.stage].seconds(at.kind) for at in self.schedule.orders[rank])

    @property
    def without_copies(self) -> Step:
        """The same step, were all that forwards keep on the device."""
        kept = replace(self, plan=replace(self.plan, offload=tuple(kind for kind in self.plan.offload if kind != "activations")))
        kept.__dict__.update(stages=self.stages, schedule=self.schedule)
        return kept

    @cached_property
    def stage_seconds(self) -> tuple[StageSeconds, ...]:
        places = self.schedule.stages
        sends = [edge.seconds if places[at] != places[at + 1] else 0.0 for at, edge in enumerate(self.pipeline.edges.values())]
        return tuple(
            StageSeconds(
                place,
                cost.forward_seconds,
                cost.input_gradient_seconds,
                cost.weight_gradient_seconds,
                cost.seconds("B"),
                send,
                cost.saved_bytes,
            )
            for place, cost, send in zip(places, self.pipeline.stages, [*sends, 0.0], strict=True)
        )

    def model_flops(self) -> float:
        """Of the products of forward and backward on all samples, recomputation left out; those that ranks along tp repeat are counted as
        often as they are done."""
        one = self.work.model_flops.of(self.plan.microbatch) * self.plan.num_microbatches
        return one * self.plan.dp * dict(self.prices.mesh.axes).get("tp", 1)


@lru_cache(maxsize=64)
def _drawn(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[PipelineSchedule, tuple[int, ...]]:
    """A schedule, and of how many microbatches each stage holds values: many plans have the same."""
    schedule = generate(name, num_ranks, num_microbatches, num_chunks)
    return schedule, live_microbatches(schedule)


def _above_rounding(seconds: float, of: float) -> float:
    """A difference of sums as large as `of`; 0 where it is no more than they are rounded by, or less."""
    return seconds if seconds > 1e-12 * of else 0.0
