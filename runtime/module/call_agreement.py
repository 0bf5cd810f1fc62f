"""What ranks agree on before a call: that all of them make it, in one state, and which share of the batch each of them has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from autopar.driver.options import BatchDims, BatchOfFirst
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.ir.shares import UnequalShares
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import CallInputs, batch_dims_of

# When ranks agree on a call: before anything of it runs, or while what no other rank hears of runs; "unequal" where it came out that
# their calls differ, and it remains to be told in what.
Agreement = Literal["now", "later", "unequal"]


# What is compared of the calls of ranks, besides shapes, in the order of `facts` of `agree_on_call`.
_FACTS = (
    "arguments that are no tensors, and requires_grad of inputs",
    "the device",
    "the model's modes, hooks, attributes and submodules",
    "grad mode",
    "autocast",
    "what of the model asks for gradients",
    "whether it is a train_step",
    "the number of training calls before it",
    "the loss scale",
    "the seed",
    "the step",
    "how often backward ran, and through how many calls it may: every rank calls it, also one that trains nothing or caught an error",
    "the values of parameters that were put in the place of others: put some there that are equal on all ranks, of one seed",
)
_SHOWN = 40  # characters: a longer value is not shown


def agree_on_call(
    inputs: CallInputs,
    problem: str | None,
    facts: tuple[object, ...],
    mesh: Mesh,
    batch_dims: BatchDims,
    world: World,
    place: str,
    agreement: Agreement,
) -> UnequalShares | None:
    """The ranks' shares of the batch where they are unequal, None where all are alike. Collective.

    problem     why this rank's inputs cannot run, or None
    facts       what chooses the program, besides shapes, see `_FACTS`; their repr must be equal on all ranks, but for addresses
    place       what is said to ranks that are at something else
    agreement   "later": None, and `world.hear()` raises `UnequalError` where they are not alike

    Raises `InputError` on every rank when one of them cannot run its call, or when their calls need different programs: otherwise the
    others would wait for a rank that raised, or that captures anew while they run.
    """
    shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for _, name, tensor in inputs.tensors}
    what = "a comparison of the ranks' calls"
    # A number says in one short message that all is well; who differs, and in what, takes several.
    told = int.from_bytes(hashlib.sha256(_repr((problem, facts, shapes)).encode()).digest()[:7])
    if agreement == "later":
        assert problem is None, problem
        world.expect_equal(told, what, place)
        return None
    if agreement == "now" and world.is_equal(told, what, place) and problem is None:
        return None
    everyone = world.gather((problem, tuple(map(_told, facts)), shapes), what)
    _refuse_different(everyone)
    return unequal_shares(inputs, [theirs for _, _, theirs in everyone], mesh, batch_dims)


def _refuse_different(everyone: Sequence[tuple[str | None, Sequence[tuple[str, str]], Mapping[str, tuple[tuple[int, ...], str]]]]) -> None:
    """Raise `InputError` where a rank has a problem, or calls differ in more than shapes: by rank the problem, facts and shapes."""
    problems: dict[str, int] = {}
    for rank, (text, _, _) in enumerate(everyone):
        if text is not None:
            problems.setdefault(text, rank)
    if problems:
        raise InputError("\n".join(f"rank {rank}: {text}" for text, rank in problems.items()))
    _, ours, our_shapes = everyone[0]
    for rank, (_, theirs, their_shapes) in enumerate(everyone):
        if their_shapes.keys() != our_shapes.keys():
            raise InputError(
                f"ranks 0 and {rank} make different calls, with inputs {our_shapes} and {their_shapes}: all ranks pass the same inputs"
            )
        for name, (_, dtype) in our_shapes.items():
            if their_shapes[name][1] != dtype:
                raise InputError(f"ranks 0 and {rank} pass {name!r} as {dtype} and as {their_shapes[name][1]}: all pass one dtype")
        if theirs != ours:
            raise InputError(
                f"ranks 0 and {rank} make different calls, in {'; '.join(_differing(ours, theirs))}. Every rank makes each call, "
                "those that evaluate among them, in the same state"
            )


def _repr(value: object) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _told(fact: object) -> tuple[str, str]:
    """What tells it from others, and what is shown of it."""
    text = _repr(fact)
    return hashlib.sha256(text.encode()).hexdigest(), text if len(text) <= _SHOWN else ""


def _differing(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, (first, shown), (other, also_shown) in zip(_FACTS, ours, theirs, strict=True):
        if first != other:
            yield f"{name} ({shown} and {also_shown})" if shown and also_shown else name


def unequal_shares(
    inputs: CallInputs, shapes: Sequence[Mapping[str, tuple[tuple[int, ...], str]]], mesh: Mesh, batch_dims: BatchDims
) -> UnequalShares:
    """What each place along dp passes of each input with a batch dim; `shapes` and dtypes are by rank and by the inputs' names.

    By the first input's length, an input has a batch dim where its dim 0 is, on every rank, as long as that. Raises `InputError` where
    shapes differ in anything else.
    """
    if isinstance(batch_dims, BatchOfFirst):
        sized = [name for _, name, tensor in inputs.tensors if tensor.ndim]
        key = batch_dims.first(sized)
        counted = {name for name in sized if key and all(len(of[name][0]) and of[name][0][0] == of[key][0][0] for of in shapes)}
        dims = {index: 0 for index, name, _ in inputs.tensors if name in counted}
    else:
        dims = batch_dims_of(inputs, batch_dims)
    first = {mesh.index(rank, mesh.parts("dp")): rank for rank in reversed(range(mesh.size))}
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for index, name, _ in inputs.tensors:
        for rank, of in enumerate(shapes):
            place = mesh.index(rank, mesh.parts("dp"))
            other = 0 if index not in dims else first[place]
            if of[name] != shapes[other][name]:
                raise _unequal(
                    name, other, rank, shapes, "ranks at one place along dp pass the same" if index in dims else "it has no batch"
                )
            if index in dims and _beside(of[name], dims[index]) != _beside(shapes[0][name], dims[index]):
                raise _unequal(name, 0, rank, shapes, f"only dim {dims[index]}, which counts samples, may differ")
        if index in dims:
            sizes = tuple(shapes[first[place]][name][0][dims[index]] for place in sorted(first))
            if not any(sizes):
                raise InputError(f"{name!r} has no samples on any rank: pass at least one")
            found.append((index, dims[index], sizes))
    return UnequalShares(tuple(found))


def _beside(kind: tuple[tuple[int, ...], str], dim: int) -> tuple[object, ...]:
    """Shape and dtype, but for one dim."""
    shape, dtype = kind
    return (len(shape), shape[:dim], shape[dim + 1 :], dtype)


def _unequal(name: str, one: int, other: int, shapes: Sequence[Mapping[str, Any]], why: str) -> InputError:
    return InputError(
        f"ranks {one} and {other} pass {name!r} of different shapes, {shapes[one][name]} and {shapes[other][name]}, but {why}; which dims "
        "count samples is said by batch_dims="
    )


def shares_to_pad(inputs: CallInputs, dims: Mapping[int, int], num_shares: int, number: int | None) -> UnequalShares | None:
    """Equal shares that `number` microbatches do not divide: padding moves samples between real ranks; None where they do divide."""
    sizes = {index: tensor.shape[dims[index]] for index, _, tensor in inputs.tensors if index in dims}
    if all(size % (number or 1) == 0 and size for size in sizes.values()):
        return None
    if 0 in sizes.values():
        raise InputError("the inputs have no samples on any rank: pass at least one")
    return UnequalShares(tuple((index, dims[index], (size,) * num_shares) for index, size in sizes.items()))
