"""Collectives of real ranks: what gloo brings equals what virtual ranks bring."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.ir.instructions import Collective, Launch
from autopar.ir.mesh import Mesh
from autopar.runtime.execute import flights, paired
from autopar.runtime.execute.distributed import DistributedTransport
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.execute.virtual import collect

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def brought(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A [4, 2] tensor of rank `rank`, of small integers; not contiguous."""
    values = torch.randint(0, 5, (2, 4), generator=torch.Generator().manual_seed(rank)).t()
    return values.to(dtype)


def collectives_agree() -> list[str]:
    mesh = Mesh((("dp", 2), ("tp.0", 1), ("tp.1", 2)))
    groups = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=30)
    axes_sets: list[tuple[str, ...]] = [("dp",), ("tp.1",), ("dp", "tp.0", "tp.1"), ("tp.1", "dp")]
    groups.create(mesh, axes_sets)
    transport, wrong = DistributedTransport(groups, mesh), list[str]()
    kinds = [("all_reduce", "sum"), ("all_reduce", "max"), ("all_gather", "copy"), ("reduce_scatter", "sum"), ("all_to_all", "copy")]
    for axes, (collective, kind), dtype in itertools.product(axes_sets, kinds, DTYPES):
        members = mesh.group(groups.rank, axes)
        count = len(members) if collective in ("reduce_scatter", "all_to_all") else 3
        parts = [brought(rank, dtype)[:count] for rank in members]
        launch = Launch(collective, kind, axes, ("a",), ("b",))  # type: ignore[arg-type]
        mine = parts[members.index(groups.rank)]
        before = mine.clone()
        (result,) = transport.wait(transport.launch(launch, [mine]))
        expected = collect(launch, parts)[members.index(groups.rank)]
        if not (torch.equal(result, expected) and result.dtype == dtype and torch.equal(mine, before)):
            wrong.append(f"{launch} {dtype}: {result.tolist()} where virtual ranks give {expected.tolist()}")
        spent = mine.contiguous()
        (result,) = transport.wait(transport.launch(launch, [spent], is_spent=True))
        is_there = result.data_ptr() == spent.data_ptr() or collective != "all_reduce" or dtype == torch.bool
        if not (torch.equal(result, expected) and is_there):
            wrong.append(f"{launch} {dtype}, in the place of its operand: {result.tolist()}")
    for collective, kind, shape in (("all_gather", "copy", (2, 0, 3)), ("reduce_scatter", "sum", (0, 3))):
        launch = Launch(collective, kind, ("dp",), ("a",), ("b",))  # type: ignore[arg-type]
        (nothing,) = transport.wait(transport.launch(launch, [torch.ones(2, 0, 3) if collective == "reduce_scatter" else torch.ones(0, 3)]))
        assert nothing.shape == shape
    (scalar,) = transport.wait(transport.launch(Launch("all_gather", "copy", ("dp",), ("a",), ("b",)), [torch.tensor(groups.rank)]))
    assert scalar.tolist() == list(mesh.group(groups.rank, ("dp",)))
    return wrong


def quietly(name: str, is_paired: bool = False) -> Any:
    """`is_paired`: gathers and scatters go between pairs of ranks, as they do with large tensors."""
    swaps = list[object]()

    def swap(group: Any, sent: Any, received: Any) -> Any:
        swaps.append(group)
        return paired.swap(group, sent, received)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(flights, "PAIRED_BYTES", 1 if is_paired else math.inf)
        patch.setattr(flights, "swap", swap)
        found = globals()[name]()
    assert bool(swaps) == is_paired
    return found


def buckets_agree() -> list[str]:
    """Several tensors at once, twice: what the first brought is still looked at when the second comes, and dropped before the third."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    groups = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=30)
    groups.create(mesh, [("dp",)])
    transport, wrong, kept = DistributedTransport(groups, mesh), list[str](), list[list[torch.Tensor]]()
    launch = Launch("all_reduce", "sum", ("dp",), ("a", "b", "c"), ("x", "y", "z"))
    for number in range(3):
        of_rank = {rank: [brought(rank + 7 * number, torch.float32)[:size] for size in (4, 1, 3)] for rank in range(4)}
        mine = of_rank[groups.rank]
        found = transport.wait(transport.launch(launch, mine))
        expected = [sum(parts) for parts in zip(*(of_rank[rank] for rank in mesh.group(groups.rank, ("dp",))), strict=True)]
        kept.append([*found, *expected])
        if number == 1:
            del kept[0], found
    for *found, one, two, three in kept:
        wrong += [
            f"{got} where it should be {wanted}"
            for got, wanted in zip(found, (one, two, three), strict=True)
            if not torch.equal(got, wanted)
        ]
    return wrong


def gathers_and_scatters_agree() -> list[str]:
    """Several tensors at once, of sizes that leave gaps between them, over two and over four ranks, in the order of the group and not."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    groups = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=30)
    axes_sets: list[tuple[str, ...]] = [("dp",), ("dp", "tp"), ("tp", "dp")]
    groups.create(mesh, axes_sets)
    transport, wrong = DistributedTransport(groups, mesh), list[str]()
    kinds: list[tuple[Collective, Literal["copy", "sum"]]] = [("all_gather", "copy"), ("reduce_scatter", "sum")]
    for axes, (collective, kind), dtype in itertools.product(axes_sets, kinds, DTYPES[:4]):
        members = mesh.group(groups.rank, axes)
        place = members.index(groups.rank)
        names = ("a", "b"), ("x", "y")
        count = len(members) if collective == "reduce_scatter" else 3
        given = {rank: (brought(rank, dtype)[:count], brought(rank + 9, dtype)[:count, :1]) for rank in members}
        found = transport.wait(transport.launch(Launch(collective, kind, axes, *names), given[groups.rank]))
        for number, got in enumerate(found):
            alone = Launch(collective, kind, axes, ("a",), ("b",))
            wanted = collect(alone, [given[rank][number] for rank in members])[place]
            if not (torch.equal(got, wanted) and got.dtype == dtype):
                wrong.append(f"{alone} {dtype}: {got.tolist()} where virtual ranks give {wanted.tolist()}")
    return wrong


def by_node_agree() -> list[str]:
    """Over four ranks of two nodes, one tensor and several at once; of ranks in another order it goes as one."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    groups = ProcessGroups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), timeout=30)
    axes_sets: list[tuple[str, ...]] = [("dp", "tp"), ("tp", "dp")]
    groups.create(mesh, axes_sets, [(axes, 2) for axes in axes_sets])
    transport, wrong = DistributedTransport(groups, mesh), list[str]()
    kinds: list[tuple[Collective, Literal["copy", "sum"]]] = [("all_gather", "copy"), ("reduce_scatter", "sum")]
    for axes, (collective, kind), dtype, number in itertools.product(axes_sets, kinds, DTYPES, (1, 2)):
        if collective == "reduce_scatter" and dtype == torch.bool and number > 1:
            continue  # is no bucket
        members = mesh.group(groups.rank, axes)
        given = {rank: (brought(rank, dtype), brought(rank + 9, dtype)[:, :1])[:number] for rank in members}
        launch = Launch(collective, kind, axes, ("a", "b")[:number], ("x", "y")[:number], 2)
        before = [each.clone() for each in given[groups.rank]]
        found = transport.wait(transport.launch(launch, given[groups.rank]))
        for which, got in enumerate(found):
            wanted = collect(launch, [given[rank][which] for rank in members])[members.index(groups.rank)]
            if not (torch.equal(got, wanted) and got.dtype == dtype and torch.equal(given[groups.rank][which], before[which])):
                wrong.append(f"{launch} {dtype}: {got.tolist()} where virtual ranks give {wanted.tolist()}")
    return wrong


def test_buckets_bring_what_single_collectives_bring(gloo_ranks: Any) -> None:
    assert gloo_ranks.run(quietly, "buckets_agree") == [[]] * 4


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("name", ["collectives_agree", "gathers_and_scatters_agree", "by_node_agree"])
def test_collectives_equal_those_of_virtual_ranks_without_a_warning(gloo_ranks: Any, name: str, is_paired: bool) -> None:
    assert gloo_ranks.run(quietly, name, is_paired) == [[]] * 4


def measured_ones_agree() -> list[list[float]]:
    """What is timed to be priced is what ranks run: one small and one large message of each."""
    init_device_mesh("cpu", (4,))
    rank, found = dist.get_rank(), list[list[float]]()
    for size in (4, flights.PAIRED_BYTES // 4):
        whole, part = torch.zeros(4 * size), torch.zeros(size)
        whole.view(4, -1)[rank] = rank + 1.0
        flights.measurable("all_gather", whole, part, dist.group.WORLD)()
        found.append(whole.view(4, -1)[:, -1].tolist())
        flights.measurable("reduce_scatter", whole, part, dist.group.WORLD)()
        found.append(part[-1:].tolist())
    return found


def test_what_is_measured_gathers_and_scatters(gloo_ranks: Any) -> None:
    wanted = [[[1.0, 2.0, 3.0, 4.0], [4.0 * (rank + 1)]] * 2 for rank in range(4)]
    assert gloo_ranks.run(measured_ones_agree) == wanted
