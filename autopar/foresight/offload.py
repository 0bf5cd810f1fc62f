"""What lies in the host's memory between its uses, on paper: the optimizer's state, which updates there, and what forwards keep.

The optimizer (ZeRO-Offload, arXiv:2101.06840): gradients that are final go to the host, it updates, parameters come back. The three go on
piece by piece, so that the slowest of them is what an update takes. Activations: what a forward keeps goes out while it computes, and comes
back while the backward does, so that an action lasts as long as the slower of both. On the device there is a layer's on its way out, and
another's on its way back.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cost.hardware.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.offload import Offload

# Of a plan: nothing, or one of these; all of them are looked at where nothing fits without.
NOTHING: tuple[str, ...] = ()
KINDS: tuple[tuple[str, ...], ...] = (("activations",), ("optimizer",), ("activations", "optimizer"))
ASKED = ("needed", "auto", "activations", "optimizer")
# Bytes a second that a host reads and writes for each of its devices, all updating at once. Assumed: an eighth of half of what two sockets
# with eight channels of DDR4-3200 can move.
HOST_BANDWIDTH = 25e9
# What a host has for each of its devices, where nothing is said. Assumed: 1 TB for eight.
HOST_BYTES = 128e9
# So that what fits exactly fits.
_ROUNDING = 1e-9


def choices(asked: str | Offload | None) -> tuple[tuple[str, ...], ...]:
    """What plans may move to the host, each of these by itself. Raises `PlanError` for a word that means nothing."""
    if asked is None or asked == "needed":
        return (NOTHING,)
    if asked == "auto":
        return (NOTHING, *KINDS)
    if isinstance(asked, Offload):
        state = ("optimizer",) if asked.state is not None else NOTHING
        without = () if asked.activations in ("host", "file") else (state,)
        return (*without, *(() if asked.activations is None else (("activations", *state),)))
    if asked not in ASKED:
        raise PlanError(f"offload={asked!r} is unknown: use {', '.join(ASKED)}, an autopar.Offload, or None for nothing")
    return ((asked,),)


def host_update_seconds(cluster: Cluster, gradient_bytes: float, update_bytes: float, parameter_bytes: float) -> float:
    """Of a rank's share: gradients that go to the host, what its optimizer passes over, parameters that come back."""
    link = cluster.copies_to("host")
    moving = max(gradient_bytes, parameter_bytes) / link.bytes_per_second
    return 2 * link.latency_seconds + max(moving, update_bytes / HOST_BANDWIDTH)


def host_copy_seconds(cluster: Cluster, size: float) -> float:
    """Of what one microbatch keeps on a stage, one way; nothing for nothing."""
    link = cluster.copies_to("host")
    return link.latency_seconds + size / link.bytes_per_second if size else 0.0


def share_on_host(totals: Iterable[tuple[float, float, float]], capacity: float) -> float:
    """What share of all that forwards keep must lie on the host so that each rank fits, at most 1: by rank the bytes that it holds where
    nothing does, of these what forwards keep, and what is on its way where something does. 0 where all fit as they are."""
    shares = [(whole + staging - capacity * (1 - _ROUNDING)) / kept if kept else 1.0 for whole, kept, staging in totals if whole > capacity]
    return min(max(shares, default=0.0), 1.0)
