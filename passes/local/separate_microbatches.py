"""Replaces reductions over microbatches inside the step, so that each microbatch can run without the others."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from autopar.errors import MicrobatchError
from autopar.graph.emit import Emitter
from autopar.graph.microbatches import (
    AddedToBuffers,
    Estimates,
    added_to_buffers,
    estimates,
    has_estimates,
    is_mean,
    joins,
    known_ahead,
    leading_to,
    mixing_launches,
    summed_later,
)
from autopar.graph.written_once import written_once
from autopar.ir.collectives import all_reduce, wait
from autopar.ir.keys import DIMS, ORIGIN, SHARDING, SOURCE
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.printing import op_name
from autopar.ir.program import Output, Program
from autopar.partition.whole_batch import Mixing, Statistics, refusal, shown

logger = logging.getLogger("autopar")
aten = torch.ops.aten


@dataclass(frozen=True)
class SeparateMicrobatches:
    """Let each microbatch take its own estimate of what joins several of them, and its part of what all have alike.

    A sum over the microbatches becomes the microbatch's own sum times their number, a maximum its own maximum: batch norm
    then normalises by the statistics of the microbatch. It takes `statistics` "own" to accept that, and is a warning. What is known
    ahead stays a sum, and what is added to a buffer (a count of tokens by expert) is the microbatch's own: every microbatch adds to it.
    A loss or gradient that is not a sum over the microbatches is their mean. Raises `MicrobatchError` for estimates that nobody accepted.

    Reads: SHARDING. Writes: plain ops in place of collectives over `mb`. Ensures: none is left but on values known ahead.
    """

    statistics: Statistics = None
    name: str = "separate microbatches"

    def apply(self, program: Program) -> Program:
        number = program.mesh.num_microbatches
        if number == 1:
            return program
        program = program.copy()
        added, mixed, estimated = added_to_buffers(program), set(mixing_launches(program)), estimates(program)
        is_exact = not has_estimates(program)
        if not is_exact and self.statistics != "own":
            found = _mixing(estimated)
            raise MicrobatchError(refusal(number, 1, found), found)
        launches = [node for node in program.graph.nodes if joins(node)]
        for node in launches:
            _require_sum(node, number, or_maximum=node in mixed)
        _warn(estimated, number)
        # Where microbatches stand for batches anyway, a count of steps counts them, as it does beside the statistics of a batch norm.
        once = written_once(program) if is_exact else {}
        for node in launches:
            _separate(node, program, number, added, node in mixed)
        return self._averaged(_marked_once(program, once), number)

    def _averaged(self, program: Program, number: int) -> Program:
        """Losses and gradients that all microbatches have alike become sums of equal parts."""
        ahead = known_ahead(program)
        outputs: list[Output] = []
        results = list(program.results)
        for index, (output, node) in enumerate(program.named_outputs()):
            assert output.sharding is not None, output
            if is_mean(output.kind, output.sharding) and node not in ahead:
                part = Emitter(program.graph, program.graph.output_node(), node).call(aten.mul.Tensor, node, 1 / number)
                DIMS[part], SHARDING[part] = (output.dims,), (summed_later(output.sharding),)
                results[index], output = part, replace(output, sharding=summed_later(output.sharding))
            outputs.append(output)
        program.graph.output_node().args = (tuple(results),)
        return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _marked_once(program: Program, once: Collection[str]) -> Program:
    """With the buffers `once`, which microbatches do not hand on, marked."""
    outputs = (replace(output, is_once=output.kind == "buffer" and output.name in once) for output in program.signature.outputs)
    return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _require_sum(launch: Node, number: int, or_maximum: bool) -> None:
    """Raises `MicrobatchError` for a collective over the microbatches that is none of what they can make up for, or wait for."""
    is_alone = launch.target is all_reduce and launch.args[1] == (MICROBATCHES,)
    if not is_alone or not (or_maximum or launch.args[-1] == "sum"):
        raise MicrobatchError(
            f"{SOURCE.get(launch)}: this op needs all samples of the batch at once ({op_name(launch.target)} over {number} microbatches), "
            "and no microbatch can make up its part alone; use num_microbatches=1",
            (Mixing(launch.name, op_name(launch.target), "all samples of the batch at once", SOURCE.get(launch)),),
        )


def _separate(launch: Node, program: Program, number: int, added: AddedToBuffers, is_mixing: bool) -> None:
    """Put in place of a collective over the microbatches what one of them makes of it.

    To a buffer it adds its own part. Else its part times their number, or its own maximum, is its estimate; what is known ahead stays
    a sum, but for a buffer that is no sum of parts: that is written anew by every microbatch.
    """
    (completed,) = launch.users
    operand = launch.args[0]
    assert isinstance(operand, Node) and completed.target is wait
    emit, is_sum = Emitter(program.graph, launch), launch.args[-1] == "sum"
    own = _Stand(emit, operand, completed)
    for user in list(completed.users):
        if is_sum and added.takes(user, completed):
            user.replace_input_with(completed, own.part())
        elif is_mixing or _ends_in_buffers(user, program, added.exact):
            user.replace_input_with(completed, own.times(number) if is_sum else own.part())
    if not completed.users:
        program.graph.erase_node(completed)
        program.graph.erase_node(launch)


@dataclass
class _Stand:
    """What stands for `completed`, made once each: its `operand` as it is, or so many times."""

    emit: Emitter
    operand: Node
    completed: Node
    made: dict[int, Node] = field(default_factory=dict[int, Node])

    def part(self) -> Node:
        return self.times(1)

    def times(self, number: int) -> Node:
        if number not in self.made:
            target, more = (aten.alias.default, ()) if number == 1 else (aten.mul.Tensor, (number,))
            made = self.made[number] = self.emit.call(target, self.operand, *more)
            ORIGIN[made], DIMS[made], SHARDING[made] = ORIGIN[self.completed], DIMS[self.completed], SHARDING[self.completed]
        return self.made[number]


def _ends_in_buffers(node: Node, program: Program, exact: Collection[str]) -> bool:
    """Whether new values of buffers that are not `exact` sums are all that becomes of `node`."""
    written = {output.name: result for output, result in program.named_outputs() if output.kind == "buffer" and output.name not in exact}
    others = {result for output, result in program.named_outputs() if output.name not in written or output.kind != "buffer"}
    return node in leading_to(program, set(written.values()) - others, lambda user, value: True)


def _mixing(estimated: Estimates) -> tuple[Mixing, ...]:
    """The places, where the search saw some that were not found before it."""
    places = [Mixing(node.name, op_name(node.target), "a sum over the batch", SOURCE.get(node)) for node in estimated.launches]
    return (*places, *(Mixing(name, "", "a buffer") for name in estimated.buffers))


def _warn(estimated: Estimates, number: int) -> None:
    places = list(dict.fromkeys(str(SOURCE.get(node)) for node in estimated.launches))
    if places:
        what = "%d values mix microbatches; each of the %d microbatches takes its own (batch norm: its own statistics): %s"
        logger.warning(what, len(estimated.launches), number, "; ".join(shown(places)))
    elif estimated.buffers:
        what = "each of the %d microbatches changes these buffers anew, from what the one before left: %s"
        logger.warning(what, number, "; ".join(shown(estimated.buffers)))
