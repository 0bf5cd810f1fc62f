"""Which version of its weights each microbatch computes with, where a pipeline updates within a step and does not wait for itself.

A call is a stretch of the stream of microbatches: its first forward begins with the weights as the call finds them, version 0, and every
`every` microbatches make an update, the next version. A microbatch's backward computes with the version of its forward.

"stash"  PipeDream's weight stashing (SOSP 2019, section 3.3): a forward takes the newest version that its stage has. Of p stages stage s is
         p - 1 - s microbatches ahead of its backwards, so of 1F1B with an update after every microbatch

             rank 0 | 0F0 0F1 0F2 0B0 - 0F3 0B1 - …       0F3 takes version 1: two updates are on their way
             rank 2 | 2F0 2B0 - 2F1 2B1 - …               2F3 takes version 3, the newest there is

"2bw"    PipeDream-2BW (ICML 2021, section 3.1): update t is by gradients at version t - 1, on all stages alike, so that two versions are
         enough: W(t + 1) = W(t) - nu grad f(W(t - 1)); the first is by those at version 0. A version is made by p microbatches or more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import PlanError
from autopar.ir.actions import PipelineSchedule

VersionKind = Literal["stash", "2bw"]


@dataclass(frozen=True)
class WeightVersions:
    """`every` is how many microbatches make an update: by default one with "stash", as many as there are stages with "2bw"."""

    kind: VersionKind
    every: int | None = None

    def each(self, order: PipelineSchedule) -> int:
        """How many microbatches make an update of a pipeline in this `order`."""
        return self.every or (1 if self.kind == "stash" else order.num_stages)

    def num_updates(self, order: PipelineSchedule) -> int:
        return order.num_microbatches // self.each(order)

    def require(self, order: PipelineSchedule) -> None:
        """Raise `PlanError` for a pipeline that has no such versions."""
        every, number = self.each(order), order.num_microbatches
        asked = f'weight_versions="{self.kind}" with an update after every {every} microbatches'
        if number < 2 or number % every:
            raise PlanError(
                f"{asked}: the {number} microbatches of a call are no whole number of updates; say num_microbatches={4 * every}"
            )
        if self.kind == "2bw" and every < order.num_stages:
            raise PlanError(
                f"{asked}: two versions are too few for {order.num_stages} stages, whose first has as many microbatches under way: say "
                f"update_every={order.num_stages}"
            )
        if order.num_stages != order.num_ranks:
            raise PlanError(f'{asked}: ranks hold several stages in the order {order.name!r}; say schedule="1f1b"')

    def staleness(self, stage: int, order: PipelineSchedule) -> int:
        """How many updates may lie between the version that a gradient of `stage` is computed at and the one that it updates, at most."""
        ahead = order.num_stages - 1 - stage if self.kind == "stash" else self.each(order)
        return min(-(-ahead // self.each(order)), self.num_updates(order) - 1)

    def taken(self, stage: int, order: PipelineSchedule) -> tuple[int, ...]:
        """By microbatch the version that `stage` computes with. Raises `PlanError` where it would be older than `staleness` says, or is
        not there when the forward begins."""
        every, done, taken = self.each(order), [0] * self.num_updates(order), dict[int, int]()
        whole = {each.microbatch: each for each in order.orders[order.stages[stage]] if each.kind in ("B", "W")}
        for action in order.orders[order.stages[stage]]:
            number = action.microbatch
            if action.kind == "F":
                newest = next((update for update, count in enumerate(done) if count < every), len(done))
                taken[number] = newest if self.kind == "stash" else max(number // every - 1, 0)
                oldest = self.staleness(stage, order)
                if taken[number] > newest or number // every - taken[number] > oldest:
                    raise PlanError(
                        f"{action} begins in the order {order.name!r} when stage {stage} has made {newest} updates of its weights, and "
                        f'weight_versions="{self.kind}" has gradients at most {oldest} updates old: say schedule="1f1b"'
                    )
            elif action == whole[number]:
                done[number // every] += 1
        return tuple(taken[number] for number in range(order.num_microbatches))
