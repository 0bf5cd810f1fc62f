"""What is indexed by a range beside other numbers becomes a gather or a scatter of each row by itself, which is split like any other.

    x[arange(n), ids]                    x.gather(1, ids)                     of each sample the entry that it asks for
    x[arange(n)[:, None], ids]           x.gather(1, ids)                     or several
    x[arange(n)]                         x                                    which autograd would scatter into zeros
    x[arange(n), ids] = values           x.scatter(1, ids, values)            accumulate=True: x.scatter_add
    x[ids, arange(n)], x[:, arange(n), ids], x[arange(n), :, ids]             likewise, in another order of dims

An index says of no dim that rows stay apart; of a gather all dims but one walk together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autopar.graph.constants import Constants
from autopar.graph.emit import Emitter, replace, tensor_of
from autopar.graph.overwrites import is_written_after
from autopar.ir.arguments import all_named
from autopar.ir.program import Program

aten = torch.ops.aten

_READS = (aten.index.Tensor,)
_IN_PLACE = (aten.index_put_.default,)
_WRITES = (aten.index_put.default, *_IN_PLACE)
# Of other dtypes an index is a mask.
_NUMBERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class DecomposeIndices:
    """Indices of which one has numbers from anywhere, and the others count 0, 1, 2, … along a dim each.

    Reads: a FORWARD program.
    Writes: `aten.gather` in the place of `aten.index`, `aten.scatter` and `aten.scatter_add` in that of `aten.index_put`.
    Ensures: the result has the values, shape, dtype and strides of torch's; an id of no entry raises as it did.
    """

    name: str = "decompose indices"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        constants = Constants(program)
        for node in list(program.graph.nodes):
            if node.target not in (*_READS, *_WRITES):
                continue
            emit, result = Emitter(node.graph, before=node), None
            if node.target in _READS and _is_whole(node, constants):
                result = emit.call(aten.clone.default, node.args[0])
            elif (rows := _Rows.of(node, constants)) is not None:
                result = _decomposed(emit, node, rows)
            if result is not None:
                replace(node, _laid_out(emit, result, tensor_of(node)))
        return program


def _is_whole(node: Node, constants: Constants) -> bool:
    """Whether `x[arange(n)]` takes all of a dim of n, in order."""
    found = all_named(node)
    given = [(tensor_of(found["self"]).shape[dim], index) for dim, index in enumerate(found["indices"]) if index is not None]
    if len(given) != 1:
        return False
    size, index = given[0]
    is_as_long = tensor_of(index).dtype in _NUMBERS and tensor_of(index).shape == (size,)
    return is_as_long and _place(index, (size,), size, constants) == 0


def _decomposed(emit: Emitter, node: Node, rows: _Rows) -> Node:
    found = all_named(node)
    if node.target in _READS:
        x = found["self"]
        # A gather keeps what it reads for its backward, an index does not.
        return rows.read(emit, emit.call(aten.clone.default, x) if is_written_after(node, x) else x)
    result = rows.written(emit, found["self"], found["values"], found["accumulate"])
    return emit.call(aten.copy_.default, found["self"], result) if node.target in _IN_PLACE else result


def _laid_out(emit: Emitter, value: Node, like: torch.Tensor) -> Node:
    """`value` with the strides of torch's result, by which forward may view it."""
    strides = [stride for size, stride in zip(like.shape, like.stride(), strict=True) if size > 1]
    if [stride for size, stride in zip(like.shape, tensor_of(value).stride(), strict=True) if size > 1] == strides:
        return value
    order = sorted(range(like.dim()), key=lambda dim: -like.stride(dim))
    copied = emit.call(aten.clone.default, _permuted(emit, value, order), memory_format=torch.contiguous_format)
    return _permuted(emit, copied, _inverse(order))


@dataclass(frozen=True)
class _Rows:
    """How `x[indices]` is a gather: `ids` point into dim `into` of x, the dims `along` of x walk with dims of `ids`.

    `common` is the shape that the indices have together, `places` are its dims that walk, in the order of `along`; `front` and `rest`
    are the dims of x without an index that stand before and behind it in the result.
    """

    ids: Node
    into: int
    along: tuple[int, ...]
    places: tuple[int, ...]
    common: tuple[int, ...]
    front: tuple[int, ...]
    rest: tuple[int, ...]

    @staticmethod
    def of(node: Node, constants: Constants) -> _Rows | None:
        x, indices = tensor_of(node.args[0]), all_named(node)["indices"]
        given: dict[int, Node] = {dim: index for dim, index in enumerate(indices) if index is not None}
        if len(given) < 2 or any(tensor_of(index).dtype not in _NUMBERS for index in given.values()):
            return None
        common = tuple(torch.broadcast_shapes(*(tensor_of(index).shape for index in given.values())))
        counted = {dim: place for dim, index in given.items() if (place := _place(index, common, x.shape[dim], constants)) is not None}
        others = [dim for dim in given if dim not in counted]
        if len(others) != 1 or len(set(counted.values())) != len(counted):
            return None
        along = tuple(sorted(counted, key=lambda dim: counted[dim]))
        free = [dim for dim in range(x.dim()) if dim not in given]
        first, last = min(given), max(given)
        front = tuple(dim for dim in free if dim < first and last - first == len(given) - 1)
        rest = tuple(dim for dim in free if dim not in front)
        return _Rows(given[others[0]], others[0], along, tuple(counted[dim] for dim in along), common, front, rest)

    def read(self, emit: Emitter, x: Node) -> Node:
        source = _permuted(emit, x, self._order)
        found = emit.call(aten.gather.default, source, len(self.front) + len(self.along), self._ids(emit, source))
        return self._as_indexed(emit, found)

    def written(self, emit: Emitter, x: Node, values: Node, accumulate: bool) -> Node:
        source = _permuted(emit, x, self._order)
        ids = self._ids(emit, source)
        op = aten.scatter_add.default if accumulate else aten.scatter.src
        found = emit.call(op, source, len(self.front) + len(self.along), ids, self._of_values(emit, values, tensor_of(ids).shape, x))
        return _permuted(emit, found, _inverse(self._order))

    @property
    def _order(self) -> tuple[int, ...]:
        """The dims of x as the gather has them."""
        return (*self.front, *self.along, self.into, *self.rest)

    @property
    def _kept(self) -> tuple[int, ...]:
        """The dims of `common` that do not walk: how many entries of a row are asked for."""
        return tuple(place for place in range(len(self.common)) if place not in self.places)

    def _ids(self, emit: Emitter, source: Node) -> Node:
        """The ids as the gather has them, [*front, *along, entries of a row, *rest]; one below 0 counts from the end."""
        shape = tensor_of(source).shape
        walking = len(self.front) + len(self.along)
        ids = emit.cast(self.ids, torch.int64)
        from_end = emit.call(aten.add.Tensor, ids, shape[walking])
        ids = emit.call(aten.where.self, emit.call(aten.lt.Scalar, ids, 0), from_end, ids)
        if tensor_of(ids).shape != self.common:
            ids = emit.call(aten.expand.default, ids, list(self.common))
        ids = _permuted(emit, ids, (*self.places, *self._kept))
        if len(self._kept) != 1:
            ids = emit.call(aten.reshape.default, ids, [*(self.common[place] for place in self.places), self._number])
        for _ in self.front:
            ids = emit.call(aten.unsqueeze.default, ids, 0)
        for _ in self.rest:
            ids = emit.call(aten.unsqueeze.default, ids, -1)
        wanted = [*shape[:walking], self._number, *shape[walking + 1 :]]
        return ids if list(tensor_of(ids).shape) == wanted else emit.call(aten.expand.default, ids, wanted)

    @property
    def _number(self) -> int:
        return math.prod(self.common[place] for place in self._kept)

    def _as_indexed(self, emit: Emitter, found: Node) -> Node:
        """From the shape of a gather to that of `x[indices]`."""
        walking = len(self.front) + len(self.along)
        if len(self._kept) != 1:
            shape = list(tensor_of(found).shape)
            shape[walking : walking + 1] = [self.common[place] for place in self._kept]
            found = emit.call(aten.view.default, found, shape)
        return _permuted(emit, found, _inverse(self._result_order))

    def _of_values(self, emit: Emitter, values: Node, shape: Sequence[int], x: Node) -> Node:
        """`values`, which have the shape of `x[indices]` or one that widens to it, in that of a scatter."""
        sizes = tensor_of(x).shape
        wanted = [*(sizes[dim] for dim in self.front), *self.common, *(sizes[dim] for dim in self.rest)]
        if list(tensor_of(values).shape) != wanted:
            values = emit.call(aten.expand.default, values, wanted)
        values = _permuted(emit, values, self._result_order)
        return values if tensor_of(values).shape == shape else emit.call(aten.reshape.default, values, list(shape))

    @property
    def _result_order(self) -> tuple[int, ...]:
        """The dims of `x[indices]` as the gather has them."""
        front, common = len(self.front), len(self.common)
        inside = (front + place for place in (*self.places, *self._kept))
        return (*range(front), *inside, *range(front + common, front + common + len(self.rest)))


def _place(index: Node, common: tuple[int, ...], size: int, constants: Constants) -> int | None:
    """The dim of `common` along which the index counts through all of a dim of `size`, the same everywhere else; None where none is."""
    value = constants.value(index) if size > 1 else None
    if value is None:
        return None
    whole = value.expand(common)
    for place, length in enumerate(common):
        if length == size:
            counting = torch.arange(size).view(size, *(1,) * (len(common) - place - 1))
            if bool((whole == counting).all()):
                return place
    return None


def _permuted(emit: Emitter, value: Node, order: Sequence[int]) -> Any:
    return value if list(order) == list(range(len(order))) else emit.call(aten.permute.default, value, list(order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))
