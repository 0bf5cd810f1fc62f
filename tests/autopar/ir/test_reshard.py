"""Reshards: the steps reach the target, move what they say, and are the cheapest of their kind."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.ir.instructions import Launch
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import ReshardStep, reachable, steps
from autopar.ir.sharding import Dims, Sharding, flat
from autopar.runtime.execute.virtual import collect
from autopar.runtime.module.parameters import assemble, local_shard
from tests.support.shardings import MESHES, dims_of, shardings

Parts = dict[int, Tensor]


def random_parts(dims: Dims, sharding: Sharding, mesh: Mesh) -> Parts:
    """Integers, equal on ranks that hold the same part, unequal where a value is unreduced."""
    draw = torch.Generator().manual_seed(0)
    found: Parts = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        holder = mesh.rank_at({axis: index if axis in sharding.axes else 0 for axis, index in at.items()})
        if holder == rank:
            found[rank] = torch.randint(-50, 50, sharding.local_shape(dims, mesh), generator=draw).double()
        else:
            found[rank] = found[holder]
    return found


def simulate(step: ReshardStep, parts: Parts, dims: Dims, mesh: Mesh) -> Parts:
    """The step on real parts, group by group."""
    atoms = flat(step.before.local_dims(dims, mesh))
    groups = {mesh.group(rank, step.axes) for rank in range(mesh.size)}
    found: Parts = {}
    for group in groups:
        brought = [parts[rank].reshape(atoms) for rank in group]
        if step.collective != "slice":
            if step.split is not None:
                brought = [torch.stack(part.chunk(len(group), step.split)) for part in brought]
            kind = "copy" if step.kind == "logsumexp" else step.kind
            got = collect(Launch(step.collective, kind, step.axes, ("x",), ("y",)), brought)
            if step.kind == "logsumexp":
                got = [part.logsumexp(0) for part in got]
            if step.gathered is not None:
                got = [torch.cat(tuple(part), step.gathered) for part in got]
        else:
            assert step.split is not None
            got = [part.chunk(len(group), step.split)[index] for index, part in enumerate(brought)]
        found |= dict(zip(group, got, strict=True))
    return {rank: part.reshape(step.after.local_shape(dims, mesh)) for rank, part in found.items()}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_steps_turn_any_sharding_into_any_that_is_reachable(data: st.DataObject) -> None:
    mesh, dims = data.draw(st.sampled_from(MESHES)), data.draw(dims_of())
    source = data.draw(shardings(dims, mesh))
    target = data.draw(shardings(dims, mesh, within=source))
    found = steps(dims, source, target, mesh)
    parts, now = random_parts(dims, source, mesh), source
    whole = assemble(parts, dims, source, mesh)
    for step in found:
        assert step.before == now and not step.after.problems(dims, mesh), step
        sizes = [len(parts[0].reshape(-1)), 0]
        parts, now = simulate(step, parts, dims, mesh), step.after
        # What is gathered becomes one number at once.
        sizes[1] = len(parts[0].reshape(-1)) * (mesh.size_of(step.axes) if step.kind == "logsumexp" else 1)
        assert (step.num_input, step.num_output) == tuple(sizes), step
    assert now == target
    torch.testing.assert_close(assemble(parts, dims, target, mesh), whole, rtol=1e-12, atol=1e-12)
    if not target.unreduced:
        for rank in range(mesh.size):
            wanted = local_shard(whole, dims, target, mesh, rank)
            torch.testing.assert_close(parts[rank], wanted, rtol=1e-12, atol=1e-12, msg=str((rank, [str(step) for step in found])))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_shrinks_a_value_comes_before_what_grows_it(data: st.DataObject) -> None:
    mesh, dims = data.draw(st.sampled_from(MESHES)), data.draw(dims_of())
    source = data.draw(shardings(dims, mesh))
    target = data.draw(shardings(dims, mesh, within=source))
    found = steps(dims, source, target, mesh)
    assert len(found) <= 2 * len(mesh.axes)
    reduced = [axis for step in found if step.kind != "copy" for axis in step.axes]
    assert sorted(reduced) == sorted({axis for axis, _ in source.unreduced} - {axis for axis, _ in target.unreduced})
    if found and all(not split for split in target.splits) and not source.unreduced:
        assert {step.collective for step in found} == {"all_gather"}
    if all(not split for split in source.splits) and not source.unreduced:
        assert {step.collective for step in found} <= {"slice"}


MESH = Mesh((("dp", 2), ("tp.0", 2), ("tp.1", 2)))
DIMS: Dims = ((8,), (2, 8))


def on(*splits: str, sums: str = "", maxima: str = "") -> Sharding:
    """`on("dp", "", "tp.0 tp.1", sums="dp")`."""
    unreduced = (*((axis, "sum") for axis in sums.split()), *((axis, "max") for axis in maxima.split()))
    return Sharding(tuple(tuple(split.split()) for split in splits), unreduced)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (on("", "", ""), on("", "", ""), []),
        (on("", "", ""), on("dp", "", "tp.0 tp.1"), ["slice(dp)", "slice(tp.0, tp.1)"]),
        (on("dp", "", "tp.0 tp.1"), on("dp", "", ""), ["all_gather(tp.0, tp.1)"]),
        (on("", "", "", sums="dp"), on("", "", ""), ["all_reduce(dp)"]),
        (on("", "", "", sums="dp tp.0"), on("", "", ""), ["all_reduce(dp, tp.0)"]),
        (on("", "", "", maxima="tp.1"), on("", "", "tp.1"), ["all_reduce(tp.1)", "slice(tp.1)"]),
        (on("", "", "", sums="tp.0 tp.1"), on("tp.0 tp.1", "", ""), ["reduce_scatter(tp.0, tp.1)"]),
        (on("", "", "", sums="dp tp.0"), on("dp", "", ""), ["reduce_scatter(dp)", "all_reduce(tp.0)"]),
        (on("tp.0", "", ""), on("", "", "tp.0"), ["all_to_all(tp.0)"]),
        (on("tp.0 tp.1", "", ""), on("", "", "tp.0 tp.1"), ["all_to_all(tp.0, tp.1)"]),
        (on("", "", "", sums="dp"), on("tp.0", "", "", sums="dp"), ["slice(tp.0)"]),
        (on("tp.0", "", "tp.1"), on("", "tp.0", "tp.1"), ["all_to_all(tp.0)"]),
        (on("dp", "", "", sums="tp.0"), on("", "", "dp", sums=""), ["all_to_all(dp)", "all_reduce(tp.0)"]),
    ],
)
def test_the_cheapest_collectives(source: Sharding, target: Sharding, expected: list[str]) -> None:
    assert [str(step) for step in steps(DIMS, source, target, MESH)] == expected


def test_only_reducing_is_possible() -> None:
    whole, partial = on("", "", ""), on("", "", "", sums="dp")
    assert reachable(partial, whole) and reachable(partial, partial) and not reachable(whole, partial)
    with pytest.raises(AssertionError):
        steps(DIMS, whole, partial, MESH)


def test_the_order_in_which_unreduced_axes_are_named_is_no_matter() -> None:
    for names in itertools.permutations(["dp", "tp.0", "tp.1"]):
        source = on("", "", "", sums=" ".join(names))
        assert steps(DIMS, source, on("", "", "", sums="dp tp.0 tp.1"), MESH) == ()
        assert [step.collective for step in steps(DIMS, source, on("", "", "", sums="tp.1 dp"), MESH)] == ["all_reduce"]
