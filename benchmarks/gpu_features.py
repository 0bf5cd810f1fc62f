"""What training with autopar offers besides an axis, a job each, for `benchmarks.gpu_multi --axes features`: losses are one process's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar import Offload, TrainStep
from benchmarks.peer_jobs import TRAINED, ParallelStep, Size, Step, batch_of, ddp, ours, share_of

EVERYTHING: dict[str, Any] = {"smallest_bytes": 0}


def _told(axis: str, look: Callable[[autopar.ParallelModule, dict[str, Tensor]], object], size: Size, rank: int, backend: str) -> Step:
    """A step of ours after whose first one somebody looks at the module; training goes on as if nobody had."""
    step, number = ours(axis, size, rank, backend, **TRAINED), 0
    assert isinstance(step, ParallelStep)
    mine = share_of(batch_of(size), rank, size.num_ranks) if axis == "dp" else batch_of(size)

    def stepped() -> Tensor:
        nonlocal number
        loss, number = step(), number + 1
        if number == 1:
            look(step._parallel, mine)
        return loss

    return stepped


def _saved(parallel: autopar.ParallelModule, batch: dict[str, Any]) -> None:
    """Away, spoiled, and back."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder, device=torch.device("cpu"))
        autopar.save(folder[0], parallel, note=1)
        parallel.train_step(**batch)
        if autopar.load(folder[0], parallel) != 1:
            raise RuntimeError("the checkpoint's note is another")
        if dist.is_initialized():
            dist.barrier()  # the folder is the first rank's, and goes when it leaves


def _verified(parallel: autopar.ParallelModule, batch: dict[str, Any]) -> None:
    report = parallel.verify(**batch)
    if not report:
        raise RuntimeError(f"not as the user's model: {report}")


def _reports(parallel: autopar.ParallelModule, batch: dict[str, Any]) -> None:
    for report in (parallel.profile(**batch), parallel.timeline(**batch), parallel.memory(measure=batch), parallel.explain()):
        if not str(report):
            raise RuntimeError("a report is empty")


def _updating(**more: Any) -> dict[str, Any]:
    return {**TRAINED, "train_step": TrainStep(**more)}


JOBS: dict[str, Callable[[Size, int, str], Step]] = {
    "DDP": ddp,
    "autopar dp, zero=1": partial(ours, "dp", zero=1),
    "autopar dp, zero=2": partial(ours, "dp", zero=2),
    "autopar dp, recompute": partial(ours, "dp", recompute="full"),
    "autopar dp, train_step": partial(ours, "dp", **TRAINED),
    "autopar dp, zero=3, train_step, clipped": partial(ours, "dp", zero=3, **_updating(clip_grad_norm=1e9)),
    "autopar dp, microbatches": partial(ours, "dp", num_microbatches=2),
    "autopar dp, bf16": partial(ours, "dp", precision="bf16", **TRAINED),
    "autopar dp, fp16, scaled": partial(ours, "dp", precision="fp16", **TRAINED),
    "autopar dp, activations on the host": partial(ours, "dp", offload=Offload(activations="host", **EVERYTHING)),
    "autopar dp, state on the host": partial(ours, "dp", offload=Offload(optimizer="host", **EVERYTHING), **TRAINED),
    "autopar dp, parameters on the host": partial(ours, "dp", offload=Offload(parameters="host", **EVERYTHING), **TRAINED),
    "autopar dp, checkpoint": partial(_told, "dp", _saved),
    "autopar dp, verified": partial(_told, "dp", _verified),
    "autopar dp, reports": partial(_told, "dp", _reports),
    "autopar tp, verified": partial(_told, "tp", _verified),
    "autopar tp, kernels": partial(ours, "tp", kernels="triton"),
    "autopar pp, train_step": partial(ours, "pp", **TRAINED),
}


def is_low(name: str) -> bool:
    """Whether a job computes in half precision, whatever its size says."""
    return name.endswith(("bf16", "fp16, scaled"))


def dtype_of(name: str, size: Size) -> torch.dtype:
    return torch.bfloat16 if is_low(name) else size.dtype
