"""A LOCAL program in which microbatches meet only before the first and after the last of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.collectives import all_reduce, is_launch, wait
from autopar.emit import Emitter
from autopar.errors import PlanError
from autopar.keys import DIMS, ORIGIN, SHARDING, SOURCE
from autopar.mesh import MICROBATCHES
from autopar.microbatches import is_summed_later, known_ahead, mixing, summed_later
from autopar.program import Output, Program
from autopar.reports.printing import op_name

logger = logging.getLogger("autopar")
aten = torch.ops.aten

# Of sums they make the sums of what they make of the terms; products and quotients of two tensors do not.
_LINEAR = frozenset(
    {
        wait, aten._to_copy.default, aten.clone.default, aten.alias.default, aten.reshape.default, aten.view.default, aten.t.default,
        aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.sum.dim_IntList, aten.sum.default,
    }
)  # fmt: skip
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
# So many places are named in the warning.
_SHOWN = 4


@dataclass(frozen=True)
class SeparateMicrobatches:
    """Let each microbatch take its own estimate of what joins several of them, and its part of what all have alike.

    A sum over the microbatches becomes the microbatch's own sum times their number, a maximum its own maximum: batch norm
    then normalises by the statistics of the microbatch. Each one is a warning. What is known ahead stays a sum, and what is added
    to a buffer (a count of tokens by expert) is the microbatch's own: every microbatch adds to it. A loss or gradient that is not a
    sum over the microbatches is their mean.

    Reads: SHARDING. Writes: plain ops in place of collectives over `mb`. Ensures: none is left but on values known ahead.
    """

    name: str = "separate microbatches"

    def apply(self, program: Program) -> Program:
        number = program.mesh.num_microbatches
        if number == 1:
            return program
        program = program.copy()
        counts, averaged = _added_to_buffers(program), _parts_of_means(program)
        mixed = mixing(program)
        places = [str(SOURCE.get(node)) for node in mixed if counts.isdisjoint(node.users) and averaged.isdisjoint(node.users)]
        for node in program.graph.nodes:
            if is_launch(node) and MICROBATCHES in node.args[1]:
                _require_sum(node, number, or_maximum=node in mixed)
        for node in mixed:
            _separate(node, program, number, counts)
        if places:
            first = list(dict.fromkeys(places))
            more = f"; and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
            logger.warning(
                "%d values mix microbatches; each of the %d microbatches takes its own (batch norm: its own statistics): %s%s",
                len(places),
                number,
                "; ".join(first[:_SHOWN]),
                more,
            )
        return self._averaged(program, number)

    def _averaged(self, program: Program, number: int) -> Program:
        """Losses and gradients that all microbatches have alike become sums of equal parts."""
        ahead = known_ahead(program)
        outputs: list[Output] = []
        results = list(program.results)
        for index, (output, node) in enumerate(program.named_outputs()):
            assert output.sharding is not None, output
            if _is_mean(output, node, ahead):
                part = Emitter(program.graph, program.graph.output_node(), node).call(aten.mul.Tensor, node, 1 / number)
                DIMS[part], SHARDING[part] = (output.dims,), (summed_later(output.sharding),)
                results[index], output = part, replace(output, sharding=summed_later(output.sharding))
            outputs.append(output)
        program.graph.output_node().args = (tuple(results),)
        return replace(program, signature=replace(program.signature, outputs=tuple(outputs)))


def _added_to_buffers(program: Program) -> frozenset[Node]:
    """The values of which nothing becomes but terms of sums that are the buffers' new values: buffer + value."""
    old = {item.name: node for item, node in program.named_inputs() if item.kind == "buffer"}
    sums: set[Node] = set()
    for output, node in program.named_outputs():
        is_sum = output.kind == "buffer" and node.target is aten.add.Tensor and node.args[0] is old[output.name] is not node.args[1]
        sums |= {node} if is_sum and len(node.users) == 1 else set()
    return _leading_to(program, sums, lambda user: user in sums or _is_one_of(user, _LINEAR)) - sums


def _parts_of_means(program: Program) -> frozenset[Node]:
    """The values of which nothing becomes but terms of losses and gradients, whose mean over the microbatches is then exact."""
    ahead = known_ahead(program)
    is_mean = [(node, _is_mean(output, node, ahead)) for output, node in program.named_outputs()]
    others = {node for node, mean in is_mean if not mean}
    ends = {node for node, _ in is_mean if node not in others and all(user.op == "output" for user in node.users)}
    return _leading_to(program, ends, lambda user: _is_one_of(user, _LINEAR | _SUMS))


def _leading_to(program: Program, ends: set[Node], through: Callable[[Node], bool]) -> frozenset[Node]:
    """`ends` and the nodes that are read for them alone, each reader on the way being one `through` which to go."""
    found = set(ends)
    for node in reversed(program.graph.nodes):
        if node.users and all(user in found and through(user) for user in node.users):
            found.add(node)
    return frozenset(found)


def _is_one_of(node: Node, ops: frozenset[object]) -> bool:
    """Whether `node` is a call of one of `ops`, or a sum over ranks; of products and quotients, with a number."""
    if node.target is all_reduce:
        return node.args[-1] == "sum"
    return node.target in ops and (node.target in _SUMS or len(node.all_input_nodes) == 1)


def _is_mean(output: Output, node: Node, ahead: frozenset[Node]) -> bool:
    """Whether an output is the mean of what the microbatches have of it."""
    assert output.sharding is not None, output
    return output.kind in ("loss", "gradient") and not is_summed_later(output.sharding) and node not in ahead


def _require_sum(launch: Node, number: int, or_maximum: bool) -> None:
    """Raises `PlanError` for a collective over the microbatches that is none of what they can make up for, or wait for."""
    is_alone = launch.target is all_reduce and launch.args[1] == (MICROBATCHES,)
    if not is_alone or not (or_maximum or launch.args[-1] == "sum"):
        raise PlanError(
            f"{SOURCE.get(launch)}: this op needs all samples of the batch at once ({op_name(launch.target)} over {number} microbatches), "
            "and no microbatch can make up its part alone; use num_microbatches=1"
        )


def _separate(launch: Node, program: Program, number: int, counts: frozenset[Node]) -> None:
    """Replace a collective over the microbatches by what one of them makes of it; of `counts` it is the microbatch's own part."""
    (completed,) = launch.users
    operand, kind = launch.args[0], launch.args[-1]
    assert isinstance(operand, Node) and completed.target is wait
    own = operand
    if kind == "sum":
        emit = Emitter(program.graph, launch)
        own = emit.call(aten.alias.default, operand) if completed in counts else emit.call(aten.mul.Tensor, operand, number)
        ORIGIN[own], DIMS[own], SHARDING[own] = ORIGIN[completed], DIMS[completed], SHARDING[completed]
    completed.replace_all_uses_with(own)
    program.graph.erase_node(completed)
    program.graph.erase_node(launch)
