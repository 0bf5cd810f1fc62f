"""Runs one op on concrete values, whole and in parts, for `autopar.ops.probing.probe` to compare.

Dims that have one size in the graph get one small size here, other sizes other ones, all divisible by 2 and 3. Literals that
look like sizes are read in several ways, and each reading under which the op runs is a trial: a literal may be a size, a bound
that small operands never reach, or a mere number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import is_fake
from autopar.graph.promote import promoted_dtype
from autopar.ir.arguments import call_of
from autopar.ir.program import operands, results_of

# Small sizes are multiples of this one; integer literals from here on may mean a size or a position.
_UNIT = 6
# Operands of more elements are not made.
_MAX_SMALL, _MAX_LARGE = 1 << 17, 1 << 20
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}
Values = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Slot:
    """Where an operand stands among the arguments."""

    index: int


@dataclass(frozen=True)
class Trial:
    """One call on concrete `values`, and its `results`. Operands that hold integers may index: no part has fewer than `smallest`."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    values: Values
    results: Values
    smallest: int

    def counts(self, size: int) -> tuple[int, ...]:
        """In how many parts a dim of `size` may be cut: the finest first."""
        return tuple(count for count in range(size, 1, -1) if size % count == 0 and size // count >= self.smallest)

    def parts(self, dims: Sequence[int | None], count: int, strided: bool) -> list[Values] | None:
        """The results of `count` calls, each on a part of every operand cut along its dim; None where a call fails."""
        found: list[Values] = []
        for index in range(count):
            values = (take(value, dim, count, index, strided) for value, dim in zip(self.values, dims, strict=True))
            part = _call(self.target, self.args, self.kwargs, tuple(values))
            if part is None or len(part) != len(self.results):
                return None
            found.append(part)
        return found

    def part(self, dims: Sequence[int | None], count: int, index: int, results: Values) -> Trial:
        """The call on one of the parts, whose results are known, as a trial."""
        values = (take(value, dim, count, index, strided=False) for value, dim in zip(self.values, dims, strict=True))
        return replace(self, values=tuple(values), results=results)

    def same(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return left.shape == right.shape and left.dtype == right.dtype and _close(left, right)


def take(value: torch.Tensor, dim: int | None, count: int, index: int, strided: bool) -> torch.Tensor:
    """Part `index` of `count` along `dim`: a run of neighbours, or every count-th element."""
    if dim is None:
        return value.clone()
    length = value.shape[dim] // count
    chosen = torch.arange(index, value.shape[dim], count) if strided else torch.arange(index * length, (index + 1) * length)
    return value.index_select(dim, chosen)


def joined(parts: Sequence[torch.Tensor], dim: int, strided: bool) -> torch.Tensor:
    """The inverse of `take`."""
    return torch.stack(list(parts), dim + 1).flatten(dim, dim + 1) if strided else torch.cat(list(parts), dim)


def small_trials(node: Node) -> tuple[Trial, ...]:
    """Several sets of values on small operands, for each reading of the literals; none for an op that fails or is not pure."""
    sizes, twice = _sized(node, 1), _sized(node, 2)
    if _num_elements(node, sizes) > _MAX_SMALL:
        return ()
    trials = tuple(_trials(node, sizes, (_positive, _signed, _wide)))
    # Integers may be counts as well, which 0 and 1 hardly show.
    if trials and _has_integers(trials[0].values) and _num_elements(node, twice) <= _MAX_SMALL:
        trials += tuple(_trials(node, twice, (_counting,)))
    return trials


def larger_trials(node: Node) -> tuple[Trial, ...]:
    """One set of values on operands as large as in the graph, or, where those are too large, several times the small ones."""
    for sizes in ({size: size for size in _sized(node, 1)}, *(_sized(node, times) for times in (4, 2, 1))):
        if _num_elements(node, sizes) <= _MAX_LARGE:
            return tuple(_trials(node, sizes, (_signed,)))
    return ()


def _sized(node: Node, times: int) -> dict[int, int]:
    """For each size in the graph, but 1, the one it has in a trial."""
    sizes = sorted({size for shape in _shapes(node) for size in shape if size > 1})
    return {size: _UNIT * times * (index + 1) for index, size in enumerate(sizes)}


def _num_elements(node: Node, sizes: Mapping[int, int]) -> int:
    return sum(math.prod(sizes.get(size, size) for size in shape) for shape in _shapes(node))


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [tuple(int(size) for size in value.shape) for source in operands(node) for value in results_of(source)[:1] if value is not None]


def _trials(node: Node, sizes: Mapping[int, int], draws: Sequence[_Draw]) -> Iterator[Trial]:
    """The trials in float64; in the op's own dtypes where it does not take that."""
    for wide in (True, False):
        found = [trial for literals in _readings(node, sizes) for draw in draws if (trial := _trial(node, sizes, literals, draw, wide))]
        if found:
            yield from found
            return


def _trial(node: Node, sizes: Mapping[int, int], literals: tuple[Any, Any], draw: _Draw, wide: bool) -> Trial | None:
    """None where the op fails, is not a function of its operands, or yields other shapes than these sizes explain."""
    sources, wanted = [results_of(source)[0] for source in operands(node)], results_of(node)
    dtype = promoted_dtype if wide else _same_dtype
    generator = torch.Generator().manual_seed(0)
    values = tuple(
        draw(tuple(sizes.get(int(size), int(size)) for size in value.shape), dtype(value.dtype), generator)
        for value in sources
        if value is not None
    )
    args, kwargs = (_with_dtypes(each, dtype) for each in literals)
    results = _pure_call(call_of(node), args, kwargs, values)
    if results is not None and _mostly_undefined(results):
        values = tuple(value.abs() + 0.25 if value.is_floating_point() else value for value in values)
        results = _pure_call(call_of(node), args, kwargs, values)
    if results is None or len(results) != len(wanted) or _mostly_undefined(results):
        return None
    for result, value in zip(results, wanted, strict=True):
        if value is None or result.dim() != value.dim() or result.dtype != dtype(value.dtype):
            return None
        if any(here != sizes.get(int(size), here) for here, size in zip(result.shape, value.shape, strict=True)):
            return None
    smallest = 1 if not _has_integers(values) else _UNIT if draw is _counting else 2
    return Trial(call_of(node), args, kwargs, values, results, smallest)


def _has_integers(values: Values) -> bool:
    return any(not value.dtype.is_floating_point and value.dtype != torch.bool for value in values)


def _mostly_undefined(results: Values) -> bool:
    """Whether a quarter of some result is NaN: roots and logarithms of negative numbers."""
    return any(bool(value.isnan().float().mean() > 0.25) for value in results if value.numel())


def _same_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _pure_call(target: Callable[..., Any], args: Any, kwargs: Any, values: Values) -> Values | None:
    """The results, if two calls under other seeds agree to the bit and leave the operands alone."""
    with torch.random.fork_rng(devices=[]):
        runs: list[Values] = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            given = tuple(value.clone() for value in values)
            found = _call(target, args, kwargs, given)
            if found is None or any(not _equal(before, after) for before, after in zip(values, given, strict=True)):
                return None
            runs.append(found)
    return runs[0] if len(runs[0]) == len(runs[1]) and all(map(_equal, *runs)) else None


def _call(target: Callable[..., Any], args: Any, kwargs: Any, values: Values) -> Values | None:
    """The results of one call as a tuple of tensors; None where it fails or yields something else."""
    try:
        with torch.no_grad():
            found = target(*_filled(args, values), **_filled(kwargs, values))
    except Exception:
        return None
    results = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    return (
        results if all(isinstance(each, torch.Tensor) and not is_fake(each) and each.layout == torch.strided for each in results) else None
    )


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """To the bit; NaNs are equal."""
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    tolerance = _TOLERANCES.get(right.dtype)
    if tolerance is None:
        return _equal(left, right)
    finite = right[right.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(left, right, rtol=0.0, atol=tolerance * scale, equal_nan=True)


_Draw = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]


def _signed(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def _positive(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    drawn = _signed(shape, dtype, generator)
    return drawn.abs() + 0.25 if dtype.is_floating_point else drawn


def _counting(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Integers up to the smallest size of a trial."""
    drawn = _signed(shape, dtype, generator)
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return torch.randint(0, _UNIT, shape, generator=generator).to(dtype) if is_integer else drawn


def _wide(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Floats of all magnitudes up to 1e4."""
    drawn = _signed(shape, dtype, generator)
    return drawn * 10.0 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)) if dtype.is_floating_point else drawn


def _readings(node: Node, sizes: Mapping[int, int]) -> list[tuple[Any, Any]]:
    """The arguments with integer literals as they are, lists of sizes mapped, all sizes mapped, and large numbers small."""
    remaining = iter(range(len(operands(node))))
    template = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda _: _Slot(next(remaining)))  # type: ignore[arg-type, return-value]

    def sized(number: int, is_listed: bool, everywhere: bool) -> int:
        return sizes.get(number, number) if is_listed or everywhere else number

    def lowered(number: int, by: int) -> int:
        return sizes[number] if number in sizes else by if abs(number) >= _UNIT else number

    ways: list[Callable[[int, bool], int]] = [
        lambda number, _: number,
        lambda number, is_listed: sized(number, is_listed, everywhere=False),
        lambda number, _: sized(number, True, everywhere=True),
        lambda number, _: lowered(number, 2),
        lambda number, _: lowered(number, 3),
    ]
    found = {repr(read): read for way in ways for read in [_mapped(template, way)]}
    return list(found.values())


def _mapped(value: Any, way: Callable[[int, bool], int], is_listed: bool = False) -> Any:
    """`value` with the integers in it mapped; `way` is told whether one stands in a list."""
    if isinstance(value, dict):
        return {name: _mapped(item, way) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(item, way, is_listed) for item in value)
    if isinstance(value, list):
        return [_mapped(item, way, True) for item in value]
    return way(value, is_listed) if isinstance(value, int) and not isinstance(value, bool) else value


def _with_dtypes(value: Any, dtype: Callable[[torch.dtype], torch.dtype]) -> Any:
    if isinstance(value, dict):
        return {name: _with_dtypes(item, dtype) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_with_dtypes(item, dtype) for item in value)
    return dtype(value) if isinstance(value, torch.dtype) else value


def _filled(value: Any, values: Values) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, values) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(item, values) for item in value)
    return values[value.index] if isinstance(value, _Slot) else value
