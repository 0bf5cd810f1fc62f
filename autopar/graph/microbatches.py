"""Microbatches are an axis in time: what that means for the nodes of a program.

The batch of every rank is cut into equal slices that run one after another. On the mesh of a program the axis `mb`
counts them, so that shardings, local shapes and coordinates say of a microbatch what they say of a rank. A value that is
unreduced over `mb` is summed when all microbatches have run. One that is reduced over it before that is either

    known ahead   it descends from the batch's inputs alone (a count of tokens): computed for all microbatches first
    mixing        it joins what the network made of several microbatches (the statistics of a batch norm): each microbatch
                  takes its own estimate of it, as it would if it were the whole batch

A buffer that changes goes from microbatch to microbatch. What is only added to one (a count) is the microbatch's own part, and exact. So is
one of whose new value nothing depends on the batch: none finds what another left of it (`written_once.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.written_once import written_once
from autopar.ir.arguments import arguments
from autopar.ir.collectives import all_gather, all_reduce, all_to_all, is_launch, reduce_scatter, reshard, wait
from autopar.ir.keys import ORIGIN
from autopar.ir.markers import recut, save
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Form, Program, operands
from autopar.ir.sharding import Sharding
from autopar.ops.traits import rounds, truncates

aten = torch.ops.aten

# They give elements of their operand, each at another place.
_MOVES = frozenset(
    {
        all_gather, all_to_all, aten.clone.default, aten.alias.default, aten.reshape.default, aten.view.default, aten.t.default,
        aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor,
        aten.select.int, aten.index_select.default, recut,
    }
)  # fmt: skip
# So do these, but for signs, repetitions, zeros and sums.
_LINEAR = (_MOVES - {aten.index_select.default}) | {
    save, aten.expand.default, aten.neg.default, aten.sum.dim_IntList, aten.sum.default, aten.select_backward.default,
    aten.slice_backward.default, aten.diagonal.default, aten.diagonal_backward.default, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.cumsum.default, aten.zeros_like.default,
}  # fmt: skip
# These do so with their first operand, where all microbatches have the others alike: derivatives, and what indices pick.
_LINEAR_IN_FIRST = frozenset(
    {
        aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default, aten.gelu_backward.default,
        aten.silu_backward.default, aten.softplus_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default,
        aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.leaky_relu_backward.default,
        aten.log_sigmoid_backward.default, aten.mish_backward.default, aten.logit_backward.default, aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default, aten.embedding_dense_backward.default, aten.gather.default,
        aten.index_select.default, aten.index.Tensor,
    }
)  # fmt: skip
_SCALES = frozenset({aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor})
_PRODUCTS = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
# They, too, make of means the mean of what they make of each.
_AFFINE = _SUMS | {
    aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor, aten.cat.default, aten.stack.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.constant_pad_nd.default,
}  # fmt: skip
# So do these, where all microbatches have the mask or the indices alike, which are the argument at this position.
_CHOOSERS: dict[Any, int] = {
    aten.where.self: 0, aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1, aten.scatter_add.default: 2, aten.scatter.src: 2,
    aten.scatter.value: 2, aten.index_add.default: 2, aten.index_put.default: 1,
}  # fmt: skip

_KNOWN_AHEAD = ("batch", "constant", "coordinate", "random_key")


def known_ahead(program: Program) -> frozenset[Node]:
    """The nodes that descend from the inputs of the call alone, and from buffers that the model does not change."""
    changed = {item.name for item in program.signature.outputs_of("buffer")}
    known: set[Node] = set()
    for item, node in program.named_inputs():
        if item.kind in _KNOWN_AHEAD or (item.kind == "buffer" and item.name not in changed):
            known.add(node)
    for node in program.graph.nodes:
        if node.op == "call_function" and all(operand in known for operand in node.all_input_nodes):
            known.add(node)
    return frozenset(known)


def alike(program: Program) -> frozenset[Node]:
    """The nodes of a LOCAL program whose values all microbatches have alike: known ahead, or made of parameters and fixed buffers."""
    ahead, changed = known_ahead(program), {item.name for item in program.signature.outputs_of("buffer")}
    found: set[Node] = set()
    for item, node in program.named_inputs():
        axes = item.name.split(",") if item.kind == "coordinate" else item.sharding.axes if item.sharding is not None else ()
        if MICROBATCHES not in axes and not (item.kind == "buffer" and item.name in changed):
            found.add(node)
    for node in program.graph.nodes:
        is_summed = node in ahead and joins(node)
        if node.op == "call_function" and (is_summed or found.issuperset(node.all_input_nodes)) and (is_summed or not joins(node)):
            found.add(node)
    return frozenset(found)


def mixing_launches(program: Program) -> tuple[Node, ...]:
    """The collectives of a LOCAL program that join what the network made of several microbatches."""
    ahead = known_ahead(program)
    return tuple(node for node in program.graph.nodes if joins(node) and node not in ahead)


def joins(node: Node) -> bool:
    """Whether a call launches a collective over the microbatches."""
    return is_launch(node) and MICROBATCHES in arguments(node)[1]


def is_summed_later(sharding: Sharding) -> bool:
    """Whether a value's parts are summed over the microbatches when all have run."""
    return (MICROBATCHES, "sum") in sharding.unreduced


def summed_later(sharding: Sharding) -> Sharding:
    """`sharding`, but for a sum over the microbatches that is still to be taken."""
    return Sharding(sharding.splits, (*sharding.unreduced, (MICROBATCHES, "sum")))


def summed(sharding: Sharding) -> Sharding:
    """`sharding` once that sum is taken."""
    return Sharding(sharding.splits, tuple(entry for entry in sharding.unreduced if entry[0] != MICROBATCHES))


@dataclass(frozen=True)
class AddedToBuffers:
    """What is only added to buffers: old ± value ± … is all that becomes of the old value and of `values`.

    `sums` are those additions; `exact` the names of buffers that nothing else reads, whose sum over the microbatches is then exact.
    """

    sums: frozenset[Node]
    values: frozenset[Node]
    exact: frozenset[str]
    alike: frozenset[Node]

    def takes(self, user: Node, value: Node) -> bool:
        """Whether all that `user` makes of `value` ends in such an addition, as a term of it and not as a factor."""
        return user in self.sums or (user in self.values and is_linear_in(user, value, self.alike))


def added_to_buffers(program: Program) -> AddedToBuffers:
    """Of a LOCAL program."""
    old = {item.name: node for item, node in program.named_inputs() if item.kind == "buffer"}
    sums: set[Node] = set()
    exact: set[str] = set()
    same = alike(program)
    for name, chain in additions_to_buffers(program).items():
        sums.update(chain)
        added = [value for each in chain for value in added_by(each, old[name], program.form)]
        if chain and len(old[name].users) == 1 and all(_is_total(value, same) for value in added):
            exact.add(name)
    values = leading_to(program, sums, lambda user, value: user in sums or is_linear_in(user, value, same)) - sums - set(old.values())
    return AddedToBuffers(frozenset(sums), values, frozenset(exact), same)


def additions_to_buffers(program: Program) -> dict[str, list[Node]]:
    """By buffer that changes the additions by which its new value came from the old one, last first, each read for the next alone; none
    where there is anything else."""
    old = {item.name: node for item, node in program.named_inputs() if item.kind == "buffer"}
    new = ((output.name, node) for output, node in program.named_outputs() if output.kind == "buffer")
    return {name: _additions(node, old[name], program.form) for name, node in new}


def _additions(new: Node, old: Node, form: Form) -> list[Node]:
    found: list[Node] = []
    while new is not old:
        if len(new.users) != 1:
            return []
        if _moves(new, form):
            new = _moved(new)
            continue
        left, right = (*new.args, None, None)[:2]
        if new.target not in _SUMS or not isinstance(left, Node) or not isinstance(right, Node) or left is right:
            return []
        found.append(new)
        from_right = _comes_from(right, old, form) and not _comes_from(left, old, form)
        new = right if from_right and new.target is aten.add.Tensor and not new.kwargs else left
    return found


def _comes_from(node: Node, old: Node, form: Form) -> bool:
    while _moves(node, form) or (node.target in _SUMS and isinstance(node.args[0], Node)):
        node = _moved(node)
    return node is old


def added_by(addition: Node, old: Node, form: Form) -> list[Node]:
    """What `addition` adds to the `old` value of a buffer, or to what additions before it made of that. Other buffers are values."""
    return [each for each in addition.all_input_nodes if not _comes_from(each, old, form)]


def _moves(node: Node, form: Form) -> bool:
    """Whether a call is part of a reshard, or a copy: the same value elsewhere. What the model itself rearranges is another value."""
    if node.target is wait:
        return _moves(_moved(node), form)
    if node.target in (aten.clone.default, aten.alias.default):
        return True
    origin = ORIGIN.get(node)
    is_own = form is Form.LOCAL and (origin is None or origin.startswith(reshard.__name__))
    return node.target in _MOVES and is_own


def _moved(node: Node) -> Node:
    operand = node.args[0]
    assert isinstance(operand, Node)
    return operand


def _is_total(value: Node, same: frozenset[Node]) -> bool:
    """Whether a value is a sum over the microbatches, but for a factor, its shape and sums over ranks."""
    while is_linear(value, same):
        if value.target is wait and joins(_moved(value)):
            return True
        # A rank's slice of what all have alike reads its place, too.
        value = next((operand for operand in value.all_input_nodes if operand not in same), _moved(value))
    return False


def parts_of_means(program: Program) -> frozenset[Node]:
    """The values of which nothing becomes but terms of losses and gradients that are the mean of what the microbatches have.

    `number` times a microbatch's own part stands for such a sum exactly, once that mean is taken.
    """
    ahead, same = known_ahead(program), alike(program)
    means = [(node, is_mean(output.kind, output.sharding) and node not in ahead) for output, node in program.named_outputs()]
    others = {node for node, mean in means if not mean}
    ends = {node for node, _ in means if node not in others and all(user.op == "output" for user in node.users)}
    return leading_to(program, ends, lambda user, value: is_affine(user, same) or is_linear_in(user, value, same))


def is_mean(kind: str, sharding: Sharding | None) -> bool:
    """Whether an output is one that the microbatches have alike, or estimates of, rather than parts."""
    assert sharding is not None
    return kind in ("loss", "gradient") and not is_summed_later(sharding)


def leading_to(program: Program, ends: set[Node], through: Callable[[Node, Node], bool]) -> frozenset[Node]:
    """`ends` and the nodes that are read for them alone, each reader on the way being one `through` which to go from the node."""
    found = set(ends)
    for node in reversed(program.graph.nodes):
        if node.users and all(user in found and through(user, node) for user in node.users):
            found.add(node)
    return frozenset(found)


def chooser_of(node: Node) -> Node | None:
    """The mask, or the indices, by which a call chooses what it gives; None for others, and where there are several."""
    place = _CHOOSERS.get(node.target)
    given = None if place is None else arguments(node)[place]
    choosing = [each for each in (given if isinstance(given, (list, tuple)) else (given,)) if isinstance(each, Node)]
    return choosing[0] if len(choosing) == 1 else None


def is_affine(node: Node, same: frozenset[Node]) -> bool:
    """Whether a call makes of the means of its operands the mean of what it makes of each: it adds, subtracts, lines up, or chooses by
    what all microbatches have alike, the nodes in `same`."""
    return node.target in _AFFINE or chooser_of(node) in same or (node.target is aten.copy.default and not rounds(node))


def is_linear(node: Node, same: frozenset[Node] = frozenset()) -> bool:
    """Whether a call makes of a sum the sum of what it makes of its terms: views, factors, derivatives, sums over ranks, casts that round
    at most.

    The nodes in `same` are no sums: a product with one of them is linear in the other operand.
    """
    if node.target in (all_reduce, reduce_scatter):
        return node.args[-1] == "sum"
    if node.target is wait:
        return is_linear(_moved(node), same)
    if node.target in _PRODUCTS and isinstance(node.args[1], Node):
        factor = node.args[1] if node.target is aten.div.Tensor or node.args[1] in same else node.args[0]
        return factor in same and not same.issuperset(node.all_input_nodes)
    if node.target is aten._to_copy.default:
        return not rounds(node)
    if node.target in _LINEAR_IN_FIRST:
        first, *others = operands(node)
        return first not in same and same.issuperset(others)
    return (node.target in _LINEAR and not truncates(node)) or (node.target in _SCALES and isinstance(node.args[1], Number))


def is_linear_in(node: Node, value: Node, same: frozenset[Node]) -> bool:
    """Whether a call is linear and `value` an operand in which it is: what all microbatches have alike is a factor beside a sum."""
    return is_linear(node, same) and (value not in same or same.issuperset(node.all_input_nodes))


@dataclass(frozen=True)
class Estimates:
    """Where microbatches come to something else than the whole batch would: `launches` that mix them, `buffers` changed anew by each."""

    launches: tuple[Node, ...]
    buffers: tuple[str, ...]


def estimates(program: Program) -> Estimates:
    """Of a LOCAL program, before its microbatches are separated."""
    added, means = added_to_buffers(program), parts_of_means(program)
    launches = tuple(node for node in mixing_launches(program) if not _is_exact(node, added, means))
    changed = {item.name for item in program.signature.outputs_of("buffer")} - added.exact
    once = written_once(program) if changed else ()
    return Estimates(launches, tuple(sorted(changed.difference(once))))


def has_estimates(program: Program) -> bool:
    """Whether microbatches of a LOCAL program come to something else anywhere than the whole batch would."""
    found = estimates(program)
    return bool(found.launches or (found.buffers and program.mesh.num_microbatches > 1))


def _is_exact(launch: Node, added: AddedToBuffers, means: frozenset[Node]) -> bool:
    """Whether what the microbatches take in place of a sum comes to that sum in the end."""
    (completed,) = launch.users
    return launch.args[-1] == "sum" and (completed in means or all(added.takes(user, completed) for user in completed.users))
