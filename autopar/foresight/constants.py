"""What prices are made of: constants of a kind of hardware, and what the software on it does.

There is one set of constants for each kind of hardware, at most ten, and one profile for each stack of software. None is of a model, of a
paper or of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import OptimizerKind
from autopar.errors import AutoparError


@dataclass(frozen=True)
class Constants:
    """Of one kind of device and its links.

    product_flops      FLOP/s of large matrix products in 16 bits; smaller ones pay for their bytes besides
    attention_flops    FLOP/s of fused attention, its products counted whole (a causal mask leaves half of them out)
    memory_bandwidth   bytes a second that kernels read and write
    launch_seconds     what a kernel costs on top of its work
    peak_flops         the data sheet's FLOP/s in 16 bits, against which MFU is counted; nothing else reads it
    inner, outer       seconds a step of a ring within a node, and a level of a tree of nodes; bytes a second of a rank and direction
    """

    product_flops: float
    attention_flops: float
    memory_bandwidth: float
    launch_seconds: float
    inner_latency: float
    inner_bandwidth: float
    outer_latency: float
    outer_bandwidth: float
    peak_flops: float

    @staticmethod
    def of(cluster: Cluster, itemsize: int = 2) -> Constants:
        """Those of a kind of hardware that published runs calibrated; of another its own numbers, as they are. With values of four bytes
        products are as much slower as the device's are."""
        found = Constants._in_16_bits(cluster)
        if itemsize <= 2:
            return found
        factor = cluster.device.flops_per_second(torch.float32) / cluster.device.flops_per_second(torch.bfloat16)
        rates = {name: factor * getattr(found, name) for name in ("product_flops", "attention_flops", "peak_flops")}
        return replace(found, **rates)

    @staticmethod
    def _in_16_bits(cluster: Cluster) -> Constants:
        known = CALIBRATED.get(cluster.device.name.lower().split()[0])
        if known is not None:
            return known
        device, inner, outer = cluster.device, cluster.inner, cluster.outer
        rate = device.flops_per_second(torch.bfloat16)
        links = (inner.latency_seconds, inner.bytes_per_second, outer.latency_seconds, outer.bytes_per_second)
        return Constants(rate, 0.6 * rate, device.memory_bandwidth, device.launch_seconds, *links, rate)


# Sources. A: set by hand before the A100 tables of benchmarks/published were compared with, and not changed since.
# H: fitted on ultrascale_h100_all_runs. M: measured, benchmarks/published (nccl_measured, matmul_mamf), see autopar/cost/hardware/clusters.
CALIBRATED = {
    "a100": Constants(
        product_flops=248e12,  # A, 250 then: 91 % of the best measured shape
        attention_flops=150e12,  # no table has fused attention: 0.6 of the rate of products
        memory_bandwidth=1.5e12,  # A: a copy within the device reaches 1.58
        launch_seconds=4e-6,  # M
        inner_latency=5.5e-6,  # M
        inner_bandwidth=235e9,  # M
        outer_latency=14e-6,  # M
        outer_bandwidth=23.8e9,  # M
        peak_flops=312e12,
    ),
    "h100": Constants(
        product_flops=700e12,  # H
        attention_flops=268e12,  # H
        memory_bandwidth=2.4e12,  # H
        launch_seconds=4e-6,  # M
        inner_latency=5.5e-6,  # M
        inner_bandwidth=450e9,  # H, the data sheet's
        outer_latency=659e-6,  # H
        outer_bandwidth=32.2e9,  # H
        peak_flops=989e12,
    ),
}


@dataclass(frozen=True)
class SoftwareProfile:
    """What a training framework does with the same model on the same devices.

    pointwise            "fused": a chain of ops between two products or collectives is one kernel; "eager": each op is one
    host_seconds         what the CPU takes to launch one kernel, products and collectives included, and, in
                         `collective_host_seconds`, what a collective of tensor parallelism takes besides. An action lasts as
                         long as the slower of CPU and device
    overlaps_gradients   whether sums of gradients over dp run beside the last backward: "always", "without zero", or "never"
    overlaps_tp          which collectives of the input gradient move their bytes beside the products of the weight gradient, where both
                         are one action: none, the "sums" of the input gradient, or "all". What starts them does not hide
    doubling_seconds     what a step waits longer, once, for every doubling of the number of nodes
    partition            "layers": as many layers to each stage as to others; "ends": one fewer to the first and the last stage;
                         "cost": a stage is full when one block more would make the products so far exceed its share; "past cost": when
                         they do exceed it
    gradient_bytes       bytes of an element of a gradient as it is accumulated, and, in `reduced_bytes`, as it goes over dp
    state_bytes          bytes a parameter of optimizer state and master weights, split by ZeRO
    keeps_gathered       whether the backward finds what was gathered over tp, or gathers it again from the parts
    holds_ahead          whether, without a pipeline, as much as was gathered is held all the same while there is room: the CPU is a
                         microbatch ahead of the device, and memory that a collective reads is not used again before it is through
    bucket_bytes         bytes a parameter of buckets of gradients, where there are sums over dp
    counts_working       "fused" or "eager": what the forward and the backward make and drop is counted, with chains as one kernel or op by
                         op; "" leaves it out
    """

    name: str
    pointwise: Literal["fused", "eager"] = "fused"
    host_seconds: float = 0.0
    collective_host_seconds: float = 0.0
    overlaps_gradients: Literal["always", "without zero", "never"] = "never"
    overlaps_tp: Literal["", "sums", "all"] = ""
    doubling_seconds: float = 0.0
    partition: Literal["layers", "ends", "cost", "past cost"] = "layers"
    gradient_bytes: float = 4.0
    reduced_bytes: float = 4.0
    state_bytes: float = 12.0
    keeps_gathered: bool = True
    holds_ahead: bool = False
    bucket_bytes: float = 0.0
    counts_working: Literal["", "fused", "eager"] = ""

    def beside(self, itemsize: int) -> SoftwareProfile:
        """Beside parameters of so many bytes an element: in float32 they have no masters."""
        return self if itemsize < 4 else replace(self, state_bytes=max(0.0, self.state_bytes - 4.0), reduced_bytes=4.0)

    def updating(self, optimizer: Any) -> SoftwareProfile:
        """With the state of that one, in float32 beside masters, where one is given: a name, a class of torch.optim, or an instance."""
        return self if optimizer is None else replace(self, state_bytes=4.0 * (OptimizerKind.of(optimizer).num_copies + 1))

    @staticmethod
    def named(name: str | SoftwareProfile) -> SoftwareProfile:
        """A known profile by name. Raises `AutoparError` for a name that is none."""
        if isinstance(name, SoftwareProfile):
            return name
        if name not in PROFILES:
            raise AutoparError(f"profile={name!r} is unknown: use {', '.join(PROFILES)}, or an autopar.SoftwareProfile")
        return PROFILES[name]


_MEGATRON = SoftwareProfile("megatron", reduced_bytes=2.0)
_MEGATRON_2022 = replace(_MEGATRON, name="megatron-2022", overlaps_tp="sums")
PROFILES = {
    "fused": SoftwareProfile("fused", overlaps_gradients="always", partition="cost"),
    "eager": SoftwareProfile("eager", pointwise="eager"),
    "megatron": _MEGATRON,
    # Since sequence parallelism (arXiv:2205.05198) the sum of an input gradient runs beside the product of the weight gradient.
    "megatron-2022": _MEGATRON_2022,
    "zero-bubble": replace(_MEGATRON_2022, name="zero-bubble", partition="ends"),
    "nanotron": SoftwareProfile(
        "nanotron",
        host_seconds=64.4e-6,  # H
        collective_host_seconds=133e-6,  # H
        # DistributedDataParallel's hooks reduce whole gradients during the last backward, ZeRO's reduce-scatters come behind it.
        overlaps_gradients="without zero",
        doubling_seconds=27.5e-3,  # H
        partition="past cost",
        # Its asynchronous column-split products wait neither for the sum of their input gradient nor for what their weight gradient
        # gathers again; that gathers of the row-split ones hide as well is what the rows say.
        overlaps_tp="all",
        keeps_gathered=False,
        # Where there is a pipeline, receiving waits for the device.
        holds_ahead=True,
        bucket_bytes=2.0,  # gradients in 16 bits beside their float32 sums
        counts_working="fused",
    ),
}
