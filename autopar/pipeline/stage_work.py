"""Where and how often each call of a program runs in a step, by the rules of `stage_rules`, of whatever form it is.

    stages   a call with a STAGE runs there, one without on every stage that reads it
    per_step calls that run once a step, not for each microbatch: copies of parameters that are there all step, what follows
             from sums over the microbatches that are known ahead (a count of tokens), and what is done to the sums of losses and
             gradients at the end
    transfers values that one stage sends another, each microbatch
    sums     results that are added up over the microbatches, or over stages

A program that nobody placed is one stage. Placements are priced by what this says of the GLOBAL program; `cut_stages` cuts the LOCAL
one by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.fx import Node

from autopar.graph.microbatches import is_summed_later, known_ahead
from autopar.ir.actions import Direction
from autopar.ir.keys import STAGE, Phase
from autopar.ir.program import Output, Program
from autopar.pipeline import stage_rules as rules
from autopar.pipeline.stage_rules import operand_of, stage_of


class Tie(NamedTuple):
    """The sum over the microbatches of a gradient's `part`, which stage `source` makes and `targets` want as well."""

    part: Node
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """A result that is summed over the microbatches: `parts` are its addends of one microbatch, each of another stage.

    `stages` are where it is wanted: those that hold the parameter whose gradient it is. `after` is what follows there.
    `target` is the node whose value the sum takes the place of.
    """

    output: Output
    target: Node
    parts: tuple[Node, ...]
    after: tuple[Node, ...]
    stages: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether one stage makes it, and wants it alone."""
        return len({*self.stages, *map(stage_of, self.parts)}) == 1

    @property
    def ties(self) -> Iterator[Tie]:
        for part in self.parts:
            targets = tuple(stage for stage in self.stages if stage != stage_of(part))
            if targets:
                yield Tie(part, stage_of(part), targets)


@dataclass(frozen=True)
class Work:
    """Reads: STAGE, PHASE, SHARDING of a GLOBAL program with its reshards, or of a LOCAL one without sums over `mb` in its loop."""

    program: Program

    @cached_property
    def calls(self) -> tuple[Node, ...]:
        return tuple(node for node in self.program.graph.nodes if node.op == "call_function")

    @cached_property
    def stages(self) -> dict[Node, dict[int, Phase]]:
        """For each call the stages that compute it, and when each does."""
        return rules.stages_of_calls(self.program)

    @cached_property
    def per_step(self) -> frozenset[Node]:
        """Calls that run once a step, not once a microbatch. Of one microbatch these are copies of parameters and what
        is done to sums over stages."""
        return self.counted | self.copies | self.dropped | {node for each in self.sums for node in each.after}

    def runs(self, node: Node) -> int:
        """How often each stage of `node` computes it in a step."""
        return 1 if node in self.per_step else self.program.mesh.num_microbatches

    def calls_at(self, stage: int) -> Iterator[tuple[Node, Phase]]:
        """The calls of a stage for every microbatch, in order."""
        for node in self.calls:
            if stage in self.stages[node] and node not in self.per_step:
                yield node, self.stages[node][stage]

    @cached_property
    def transfers(self) -> dict[tuple[int, int, Direction], tuple[Node, ...]]:
        """The values that go from stage to stage: activations forward, gradients back."""
        found: dict[tuple[int, int, Direction], dict[Node, None]] = {}
        for node in self.calls:
            for operand in node.all_input_nodes if node not in self.per_step else ():
                if operand in STAGE and operand not in self.per_step:
                    for stage in sorted(self.stages[node].keys() - self.stages[operand]):
                        way = rules.direction_of(operand, node, stage, self.stages)
                        found.setdefault((STAGE[operand], stage, way), {})[operand] = None
        return {ends: tuple(values) for ends, values in found.items()}

    def waited_for(self, stage: int) -> frozenset[Node]:
        """The backward calls of a stage that its gradients for other stages descend from."""
        own = frozenset(node for node, phase in self.calls_at(stage) if phase == "backward")
        sent = (node for (source, _, way), nodes in self.transfers.items() if (source, way) == (stage, "B") for node in nodes)
        return frozenset(rules.ancestors(sent, within=own))

    def reading(self, value: Node) -> frozenset[int]:
        """The stages that read an input."""
        return frozenset(stage for user in value.users for stage in self.stages.get(user, ()))

    def holding(self, output: Output) -> frozenset[int]:
        """The stages that read the parameter of a gradient; of another output none."""
        return self.reading(self._parameters[output.name]) if output.kind == "gradient" else frozenset()

    @cached_property
    def _parameters(self) -> dict[str, Node]:
        return {item.name: node for item, node in self.program.named_inputs() if item.kind == "parameter"}

    @cached_property
    def sums(self) -> tuple[Sum, ...]:
        """Of one microbatch there is no sum but where several stages have parts of a gradient, or want it."""
        named = self.program.named_outputs()
        if self.program.mesh.num_microbatches > 1:
            summed = [(output, node) for output, node in named if output.sharding is not None and is_summed_later(output.sharding)]
            return tuple(self._sum(output, node) for output, node in summed)
        gradients = [self._sum(output, node) for output, node in named if output.kind == "gradient" and node.op == "call_function"]
        chosen = [each for each in gradients if not each.is_local]
        # Equal gradients of several parameters are one: what is done to it once is done once for all of them.
        while alike := [each for each in gradients if each not in chosen and any(_is_shared(each, other) for other in chosen)]:
            chosen += alike
        return tuple(each for each in gradients if each in chosen)

    def _sum(self, output: Output, result: Node) -> Sum:
        way = self._way_to(result)
        target = operand_of(way[-1]) if way else result
        # With whatever else the calls on the way read: a rank's index.
        after = {each for call in way for each in (call, *call.all_input_nodes[1:]) if each.op == "call_function"}
        parts = tuple(rules.addends(target, self.stages))
        stages = self.holding(output) or {stage_of(part) for part in parts}
        return Sum(output, target, parts, tuple(sorted(after)), tuple(sorted(stages)))

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """What stages exchange once a step: gradients of parameters that several hold, or another than the one that makes them."""
        return tuple(dict.fromkeys(tie for each in self.sums for tie in each.ties))

    @cached_property
    def counted(self) -> frozenset[Node]:
        """Sums over the microbatches that are known ahead, and what follows from them alone."""
        return rules.follows_counts(self.program)

    @cached_property
    def copies(self) -> frozenset[Node]:
        """Copies of parameters that are there all step, and what makes them."""
        return rules.makes_copies(self.program)

    @cached_property
    def finishing(self) -> frozenset[Node]:
        """What is done to losses and gradients that are complete but for the sum over the microbatches, of one microbatch as well."""
        ahead = known_ahead(self.program)
        results = [node for output, node in self.program.named_outputs() if output.kind in ("loss", "gradient") and node not in ahead]
        return frozenset(node for result in results for node in self._way_to(result))

    def _way_to(self, result: Node) -> list[Node]:
        return rules.way_to(result, rules.cut_axes(self.program), rules.held_in(self.program))

    @cached_property
    def dropped(self) -> frozenset[Node]:
        """Additions of gradients from several stages: the addends are summed over the microbatches first."""
        found = [rules.ancestors([each.target], stop=frozenset(each.parts)).difference(each.parts) for each in self.sums]
        return frozenset().union(*found)


def _is_shared(one: Sum, other: Sum) -> bool:
    return not {one.target, *one.after}.isdisjoint((other.target, *other.after))
