"""The door to plans: `autopar.rank_plans`, which mesh of so many devices takes least time, and what to run on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import bytes_of
from autopar.doors.measure_work import Inputs, tokens_per_sample, works_of
from autopar.driver.options import BatchDims, refuse_no_number
from autopar.driver.progress import progress
from autopar.errors import InputError, MeshError, PlanError
from autopar.foresight.constants import SoftwareProfile
from autopar.foresight.offload import HOST_BYTES, KINDS, choices
from autopar.foresight.question import SCHEDULES, Question, divisors
from autopar.foresight.ranking import RankedPlans, ranking
from autopar.foresight.search import Search
from autopar.foresight.step import RECOMPUTE
from autopar.foresight.work import ModelWork
from autopar.ir.offload import Offload
from autopar.ir.zero import LEVELS
from autopar.pipeline.schedules import GENERATORS

# The largest tp that is tried on a cluster without nodes.
_IDEAL_NODE = 8


def rank_plans(
    model: nn.Module | Mapping[int, ModelWork],
    *,
    cluster: Cluster | str,
    global_batch: int,
    num_devices: int | None = None,
    example_inputs: Inputs = (),
    memory: str | float | None = None,
    tp: Sequence[int] | None = None,
    precision: str | None = "bf16",
    kernels: str = "off",
    profile: str | SoftwareProfile = "fused",
    num_microbatches: int | None = None,
    schedule: str | None = None,
    recompute: str | Sequence[str] | None = None,
    zero: int | None = None,
    offload: str | Offload | None = "needed",
    host_memory: str | float = HOST_BYTES,
    batch_dims: BatchDims | None = None,
    optimizer: Any = None,
) -> RankedPlans:
    """Which mesh, and what to run on it: the fastest plan of each pp × dp × tp of all devices, as `predict` prices them, best first.

    model         as for `predict`, or what `measure_work` has read of it by the size of tp
    cluster       "h100:128" is 128 devices of that kind; with a `Cluster` pass `num_devices`
    memory        what a device may hold, "72GiB" or bytes; all it has by default
    tp            sizes of tp to look at; by default the divisors of a node's devices. Each takes a capture
    num_microbatches, schedule, recompute, zero
                  plans of these alone. Else all numbers of microbatches (one where the model mixes samples, as batch norm does in
                  training), 1F1B, interleaved, ZB-H1 and ZB-V, "none", "selective" and "full", all levels of ZeRO
    offload       what may lie on the host: "needed" is whatever makes plans fit, where none does without; "auto" weighs plans with and
                  without; "activations" (as much as it takes to fit), "optimizer" or an `Offload` are plans with these alone; None is
                  nothing
    host_memory   what the host has for each device: "256GiB", or bytes
    batch_dims    which dim of the inputs counts samples, as for `autopar.compile`
    optimizer     whose state is counted, as for `predict`

    The model's shardings over tp are those that the search of `autopar.compile` finds. Ctrl-C gives what is known so far: while the model
    is read the plans of those sizes of tp that it has been read with, or, where there is none yet, a KeyboardInterrupt. Raises as `predict`
    does.
    """
    here, number = _devices(cluster, num_devices)
    if global_batch < 1:
        raise InputError(f"global_batch={global_batch}: pass the number of samples of a step, 1 or more")
    refuse_no_number(num_microbatches)
    if schedule not in (None, "auto", *GENERATORS):
        raise PlanError(f"schedule={schedule!r} is unknown: use auto, {', '.join(GENERATORS)}")
    if zero is not None and zero not in LEVELS:
        raise PlanError(f"zero={zero!r} is no level of ZeRO: use 0, 1, 2 or 3")
    known_sizes = list(model) if isinstance(model, Mapping) else _tp_sizes(here, number)
    sizes = known_sizes if tp is None else list(tp)
    _refuse_sizes(sizes, number, list(model) if isinstance(model, Mapping) else sizes)
    with progress("planning") as show:
        works, is_complete, software = dict[int, ModelWork](), True, SoftwareProfile.named(profile).updating(optimizer)
        capacity = here.device.memory_bytes if memory is None else bytes_of(memory, "memory")
        try:
            show("reading the model")
            read = (
                model.__getitem__
                if isinstance(model, Mapping)
                else works_of(model, example_inputs, here, None, precision, kernels, batch_dims)
            )
            for size in sizes:
                show(f"reading the model with tp = {size}")
                works[size] = read(size)
        except KeyboardInterrupt:
            if not works:
                raise
            is_complete = False
        known = software.beside(works[sizes[0]].itemsize)
        tokens = tokens_per_sample(example_inputs, batch_dims)
        question = Question(
            works,
            here,
            number,
            global_batch,
            capacity,
            known,
            tokens,
            num_microbatches,
            (schedule,) if schedule is not None else SCHEDULES,
            _recomputations(recompute),
            (zero,) if zero is not None else tuple(LEVELS),
            choices(offload),
            bytes_of(host_memory, "host_memory"),
        )
        search = Search(question, show)
        try:
            search.run()
            if offload == "needed" and not search.has_plans:
                search = _with_offload(search)
        except KeyboardInterrupt:
            is_complete = False
    return ranking(search, is_complete)


def _with_offload(search: Search) -> Search:
    """What fits where something lies on the host; the search that it was where nothing does."""
    other = Search(replace(search.question, offloads=KINDS), search.told)
    other.run()
    return other if other.has_plans else search


def _refuse_sizes(sizes: Sequence[int], num_devices: int, known: Sequence[int]) -> None:
    """Of tp, where works are `known` of some."""
    if not sizes:
        raise MeshError("no size of tp to look at: pass tp=(1,), or leave it out")
    if wrong := [each for each in sizes if each < 1 or num_devices % each]:
        raise MeshError(f"tp = {wrong[0]} does not divide {num_devices} devices: use divisors of it")
    if unread := [each for each in sizes if each not in known]:
        raise PlanError(
            f"tp = {unread[0]} is asked for, and the works that were passed are of tp = {', '.join(map(str, known))}: read it, too, with "
            f"autopar.measure_work(model, ..., tp={unread[0]})"
        )


def _tp_sizes(cluster: Cluster, num_devices: int) -> list[int]:
    """Within a node; the ideal cluster has no nodes."""
    on_node = cluster.ranks_per_node
    if on_node == 1:
        return [each for each in divisors(num_devices) if each <= _IDEAL_NODE]
    return [each for each in divisors(num_devices) if on_node % each == 0]


def _recomputations(asked: str | Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(RECOMPUTE) if asked is None else (asked,) if isinstance(asked, str) else tuple(asked)
    if unknown := [each for each in names if each not in RECOMPUTE]:
        raise PlanError(f"recompute={unknown[0]!r} is unknown: use {', '.join(RECOMPUTE)}")
    return names


def _devices(cluster: Cluster | str, num_devices: int | None) -> tuple[Cluster, int]:
    """The cluster, and how many of its devices."""
    if isinstance(cluster, Cluster):
        if num_devices is None:
            raise MeshError("how many devices? Pass num_devices=128")
        return cluster, _positive(num_devices)
    found, number = Cluster.with_number(cluster)
    if number is None and num_devices is None:
        raise MeshError(f'how many devices? Write cluster="{cluster}:128", or pass num_devices=128')
    if number is not None and num_devices not in (None, number):
        raise MeshError(f"cluster={cluster!r} has {number} devices, and num_devices={num_devices}: leave one of them out")
    return found, _positive(number or num_devices or 0)


def _positive(num_devices: int) -> int:
    if num_devices < 1:
        raise MeshError(f"a cluster of {num_devices} devices runs nothing: pass 1 or more")
    return num_devices
