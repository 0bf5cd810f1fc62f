"""Proves a rule on one op instance: the op run whole against the op run in parts, on small random values.

    failures = prove(node)            # every factor split, every linear set, one axis at a time
    failures = prove_strategy(...)    # one strategy on one mesh

`layout` lays out what ranks hold of each operand in another way: collectives and slices may leave it with any strides.

Floats are float64 whatever the node's dtypes, so parts and whole agree to 1e-12; integers agree exactly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Interpreter, Node

from autopar._torch import FakeTensorMode, fake_mode
from autopar.ir.arguments import call_of, int_at, list_at
from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.program import operands, results_of
from autopar.ir.sharding import Dims, Sharding, Strategy, flat
from autopar.ir.sharding import shape_of as shape_of_dims
from autopar.ops.atoms import find_atoms_of
from autopar.ops.localise import LocalBuilder, localise
from autopar.ops.rules.labels import is_zero, shape_of
from autopar.ops.rules.ours import traits_of
from autopar.ops.strategies import AxisChoice, build, operand_dims, space_of

TOLERANCE = 1e-12
Values = tuple[torch.Tensor, ...]
# The same values with other strides.
Restride = Callable[[torch.Tensor], torch.Tensor]


@cache
def _mode() -> FakeTensorMode:
    """One fake mode for all proofs: its caches make them quick."""
    return fake_mode()


def instance(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A node that calls `target`, alone in a graph, to prove a rule on.

    Tensors among the arguments give shapes and dtypes of operands; atoms are those that the op's own rule tells apart.
    """
    builder = LocalBuilder(Graph(), _mode())

    def place(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [place(item) for item in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        return builder.placeholder("operand", argument.shape, argument.dtype)

    node = builder.call(target, *map(place, args), **{name: place(value) for name, value in kwargs.items()})
    find_atoms_of(builder.graph)
    return node


def prove(node: Node, seed: int = 0, layout: Restride = torch.Tensor.contiguous) -> list[str]:
    """Run `node` whole and in parts, for every factor and every linear set of its rule; what differs, in words.

    Reads DIMS and fake values of the node and its operands. A factor is split by its smallest prime.
    """
    space, found = space_of(node), list[str]()
    choices: list[tuple[int, AxisChoice]] = [(_smallest_prime(factor.size), factor) for factor in space.factors]
    choices += [(2, group) for group in space.linear]
    for parts, choice in choices:
        mesh = Mesh((("x", parts),))
        found += prove_strategy(node, build(space, [("x", choice)], mesh), mesh, seed, layout)
    return found


def prove_strategy(node: Node, strategy: Strategy, mesh: Mesh, seed: int = 0, layout: Restride = torch.Tensor.contiguous) -> list[str]:
    """Run `node` whole, and by `strategy` on every rank of `mesh`; what differs, in words."""
    generator = torch.Generator().manual_seed(seed)
    values, want = _instance(node, generator)
    dims = operand_dims(node)
    held = [_shares(value, dim, sharding, mesh, generator) for value, dim, sharding in zip(values, dims, strategy.operands, strict=True)]
    where = f"{node.format_node()} by {strategy} on {mesh}"
    try:
        run = _local_run(node, strategy, mesh, layout)
        parts = [run([layout(shares[rank]) for shares in held], rank) for rank in range(mesh.size)]
    except Exception as error:
        return [f"{where}: the local op fails: {type(error).__name__}: {error}"]
    found: list[str] = []
    for index, whole in enumerate(want):
        if whole is not None:
            problem = _compare(whole, [part[index] for part in parts], DIMS[node][index], strategy.results[index], mesh)
            found += [f"{where}: result {index} {problem}"] if problem else []
    return found


def take(value: torch.Tensor, dims: Dims, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of a logical value that `rank` holds; what is unreduced is left as it is."""
    part = value.reshape(flat(dims))
    for atom, axes in enumerate(sharding.splits):
        size = part.shape[atom] // mesh.size_of(axes)
        part = part.narrow(atom, mesh.index(rank, axes) * size, size)
    return part.reshape(sharding.local_shape(dims, mesh)).contiguous()


def assemble(parts: Sequence[torch.Tensor], dims: Dims, sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """The logical value from what the ranks hold, one part per rank: reduced, then put side by side."""
    local = flat(sharding.local_dims(dims, mesh))
    whole = torch.empty(flat(dims), dtype=parts[0].dtype)
    axes = [axis for axis, _ in sharding.unreduced]
    for rank, part in enumerate(parts):
        if any(mesh.coordinates(rank)[axis] for axis in axes):
            continue
        box = tuple(
            slice(mesh.index(rank, split) * size, (mesh.index(rank, split) + 1) * size)
            for split, size in zip(sharding.splits, local, strict=True)
        )
        whole[box] = _reduce(part, [parts[other] for other in mesh.group(rank, axes)], sharding, mesh, rank).reshape(local)
    return whole.reshape(shape_of_dims(dims))


def _reduce(part: torch.Tensor, group: list[torch.Tensor], sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """Reduce a group of parts, ordered by their index along the unreduced axes, the last axis first."""
    if not sharding.unreduced:
        return part
    stacked = torch.stack(group).reshape([mesh.size_of((axis,)) for axis, _ in sharding.unreduced] + list(part.shape))
    for _, kind in reversed(sharding.unreduced):
        dim = stacked.dim() - part.dim() - 1
        stacked = stacked.sum(dim) if kind == "sum" else stacked.amax(dim) if kind == "max" else stacked.logsumexp(dim)
    return stacked


def _compare(whole: torch.Tensor, parts: list[torch.Tensor], dims: Dims, sharding: Sharding, mesh: Mesh) -> str:
    expected = sharding.local_shape(dims, mesh)
    shapes = {tuple(part.shape) for part in parts}
    if shapes != {expected}:
        return f"has local shapes {shapes}, expected {expected}"
    for rank, part in enumerate(parts):
        twin = mesh.group(rank, [axis for axis in mesh.names if axis not in sharding.axes])[0]
        if _error(part, parts[twin]) > TOLERANCE:
            return f"differs between ranks {twin} and {rank}, which should hold the same"
    error = _error(assemble(parts, dims, sharding, mesh), whole)
    return f"is off by {error:.3g} ({sharding.describe(dims)})" if error > TOLERANCE else ""


def _error(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference relative to the largest value; equal infinities and NaNs agree."""
    if torch.equal(left, right):
        return 0.0
    a, b = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.double() for value in (left, right))
    same = (a == b) | (a.isnan() & b.isnan())
    worst = torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf).max().item()
    return worst / max(1.0, b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)


def _smallest_prime(size: int) -> int:
    return next(divisor for divisor in range(2, size + 1) if size % divisor == 0)


def _float64(argument: Any) -> Any:
    """An argument with floating dtypes replaced."""
    if isinstance(argument, torch.dtype):
        return _promoted(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument)(_float64(item) for item in argument)
    return argument


def _promoted_meta(node: Node) -> dict[Any, Any]:
    """DIMS and the fake values of a node, floats as float64."""
    values = [
        torch.empty(value.shape, dtype=_promoted(value.dtype), device="meta") if value is not None else None for value in results_of(node)
    ]
    several = isinstance(node.meta["val"], (tuple, list))
    return {DIMS: DIMS[node], "val": tuple(values) if several else values[0]}


def _twin(node: Node) -> Node:
    """The node alone in a new graph, one placeholder per operand, repeats kept."""
    graph = Graph()

    def operand(source: Node) -> Node:
        copy = graph.placeholder(source.name)
        copy.meta = _promoted_meta(source)
        return copy

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
    kwargs = {name: _float64(value) for name, value in kwargs.items()}
    twin = graph.create_node(node.op, node.target, tuple(_float64(value) for value in args), kwargs)
    twin.meta = _promoted_meta(node)
    return twin


def _local_run(node: Node, strategy: Strategy, mesh: Mesh, layout: Restride) -> Callable[[Sequence[torch.Tensor], int], tuple[Any, ...]]:
    """The local form of `node` as a function of local operands and a rank."""
    if node.target is operator.getitem:
        return lambda shares, _: (shares[0],)
    twin = _twin(node)
    builder = LocalBuilder(Graph(), _mode())
    inputs = [
        builder.placeholder(f"operand_{i}", sharding.local_shape(dims, mesh), _promoted(source.meta["val"].dtype))
        for i, (source, dims, sharding) in enumerate(zip(operands(node), operand_dims(node), strategy.operands, strict=True))
    ]
    with builder.mode:
        for operand in inputs:
            operand.meta["val"] = layout(operand.meta["val"])
    result = localise(twin, strategy, tuple(inputs), builder, mesh)
    builder.graph.output(result)
    interpreter = Interpreter(torch.nn.Module(), graph=builder.graph)

    def run(shares: Sequence[torch.Tensor], rank: int) -> tuple[Any, ...]:
        coordinates = [torch.tensor(mesh.index(rank, axes)) for axes in builder.coordinates]
        with torch.no_grad():
            value = interpreter.run(*shares, *coordinates)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)

    return run


def _promoted(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _instance(node: Node, generator: torch.Generator) -> tuple[Values, tuple[torch.Tensor | None, ...]]:
    """Random operands and the results of the whole op; positive floats where signed ones give NaN (log, rsqrt)."""
    results: tuple[Any, ...] = ()
    for is_positive in (False, True):
        values = tuple(_random(node, i, generator, is_positive) for i in range(len(operands(node))))
        if node.target is operator.getitem:
            return values, values
        results = _whole(node, values)
        if not any(isinstance(value, torch.Tensor) and value.is_floating_point() and value.isnan().any() for value in results):
            return values, results
    return values, results


def _whole(node: Node, values: Values) -> tuple[Any, ...]:
    remaining = iter(values)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: next(remaining))
    kwargs = {name: _float64(value) for name, value in kwargs.items()}
    with torch.no_grad():
        result = call_of(node)(*(_float64(value) for value in args), **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _random(node: Node, index: int, generator: torch.Generator, is_positive: bool) -> torch.Tensor:
    value = results_of(node)[0] if node.target is operator.getitem else results_of(operands(node)[index])[0]
    assert value is not None
    shape = tuple(value.shape)
    if is_zero(operands(node)[index]):
        return torch.zeros(shape, dtype=_promoted(value.dtype))
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    if value.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    if not value.dtype.is_floating_point:
        if operands(node)[index] is _classes_of(node):
            return torch.arange(shape[0])
        low, high = (0, bound) if (bound := _index_bound(node, index)) else (1, 7)
        return torch.randint(low, high, shape, generator=generator).to(value.dtype)
    if is_positive:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.25
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _classes_of(node: Node) -> Any:
    """The operand that holds consecutive numbers of classes, if there is one."""
    traits = traits_of(node)
    return node.args[traits.classes.numbers] if traits is not None and traits.classes is not None else None


def _index_bound(node: Node, index: int) -> int:
    """One more than the largest index that an integer operand may hold; 0 for operands that index nothing."""
    traits = traits_of(node)
    if traits is not None:
        classes = traits.classes
        return shape_of(node.args[classes.numbers])[0] if classes is not None and operands(node)[index] is node.args[classes.labels] else 0
    name = str(node.target).removeprefix("aten.").split(".")[0]
    if name in _INDEXING:
        return _INDEXING[name](node).get(index, 0)
    if "pool" in name and name.endswith("backward") and index == len(operands(node)) - 1:
        num_space = int(name[name.index("pool") + 4])
        return math.prod(shape_of(node)[-num_space:])
    return 0


def _along_dim(node: Node) -> dict[int, int]:
    """Ops on (source, dim, ids, …)."""
    shape = shape_of(node.args[0])
    return {1: shape[int_at(node, 1)] if shape else 1}


def _by_tensors(node: Node) -> dict[int, int]:
    """Ops on (source, one tensor of ids or None for each dim, …)."""
    indexed = [dim for dim, tensor in enumerate(list_at(node, 1)) if tensor is not None]
    return {position: shape_of(node.args[0])[dim] for position, dim in enumerate(indexed, 1)}


# For ops with operands that index: the bounds by the operands' positions.
_INDEXING: dict[str, Callable[[Node], dict[int, int]]] = {
    "embedding": lambda node: {1: shape_of(node.args[0])[0]},
    "embedding_dense_backward": lambda node: {1: shape_of(node)[0]},
    "index": _by_tensors,
    "_unsafe_index": _by_tensors,
    "index_put": _by_tensors,
    "_unsafe_index_put": _by_tensors,
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"), _along_dim
    ),
}


def _shares(value: torch.Tensor, dims: Dims, sharding: Sharding, mesh: Mesh, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank holds of an operand: its slice, of random addends where the operand is unreduced."""
    axes = [axis for axis, _ in sharding.unreduced]
    addends = {index: value for index in range(mesh.size_of(axes))}
    if axes:
        count = len(addends)
        shape = (count - 1, *value.shape)
        if value.is_floating_point() or value.is_complex():
            others = torch.randn(shape, generator=generator, dtype=value.dtype)
        else:
            others = torch.randint(-5, 6, shape, generator=generator).to(value.dtype)
        addends = dict(enumerate([*others.unbind(), value - others.sum(0).to(value.dtype)]))
    return [take(addends[mesh.index(rank, axes)], dims, sharding, mesh, rank) for rank in range(mesh.size)]
