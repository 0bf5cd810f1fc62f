"""What `benchmarks.peers` compares on two gloo ranks of one thread each, and `benchmarks.gpu_multi` on GPUs: one training step of one GPT,
by autopar and by the peers.

A job is built by each of its ranks for itself and gives a function that makes one step and returns its loss (this rank's share of the
batch where the peer reports no more; NaN where another rank has it), which nobody has looked at yet; `waited` says how long a rank was
blocked so far, where the step can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Node
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.graph import fragments
from autopar.passes.schedule.overlap_communication import Overlap, OverlapCommunication
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.reports.step_parts import step_parts

WORLD_SIZE = 2
NUM_MICROBATCHES = 4

Step = Callable[[], Tensor]
_BLOCK = re.compile(r"^blocks\.(\d+)")


@dataclass(frozen=True)
class Size:
    """How large the model and the global batch are, on how many ranks, and where; the folder, if any, that compiles are read from."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    symbols: int = 8192
    num_ranks: int = WORLD_SIZE
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    cache: Path | None = None


# What is slow in a step of each: contractions, the wire, calls from Python.
SIZES = {
    "compute": Size(layers=6, width=512, heads=8, batch=8, length=256),
    "comm": Size(layers=6, width=768, heads=12, batch=2, length=64),
    "small": Size(layers=24, width=128, heads=4, batch=4, length=64),
}


class Block(nn.Module):
    """Query, key and value have a projection each, as torch's tensor parallel wants them: 16 parameters a layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.head_size = size.width, size.width // size.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_attention(x)
        batch, length, _ = y.shape
        query, key, value = (part(y).view(batch, length, -1, self.head_size).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))


class GPT(nn.Module):
    """The layers from `first` up to `last`; the first of all embeds, the last of all makes logits."""

    def __init__(self, size: Size, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = size.layers if last is None else last
        is_first, is_last = first == 0, last == size.layers
        self.symbols = nn.Embedding(size.symbols, size.width) if is_first else None
        self.positions = nn.Embedding(size.length, size.width) if is_first else None
        self.blocks = nn.ModuleList(Block(size) for _ in range(first, last))
        self.norm, self.head = (nn.LayerNorm(size.width), nn.Linear(size.width, size.symbols)) if is_last else (None, None)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = tokens
        if self.symbols is not None and self.positions is not None:
            x = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is None or self.head is None:
            return x
        logits = self.head(self.norm(x))
        return logits if labels is None else loss_of(logits, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model_of(size: Size) -> GPT:
    torch.manual_seed(0)
    with torch.device(size.device):
        return GPT(size).to(size.dtype)


def batch_of(size: Size) -> dict[str, Tensor]:
    """The global batch."""
    windows = torch.randint(0, size.symbols, (size.batch, size.length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}
    return {name: value.to(size.device) for name, value in batch.items()}


def share_of(batch: Mapping[str, Tensor], rank: int, num_ranks: int = WORLD_SIZE) -> dict[str, Tensor]:
    return {name: value.chunk(num_ranks)[rank] for name, value in batch.items()}


ADAMW: dict[str, Any] = {"lr": 1e-4, "foreach": True}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **ADAMW)


def training_step(module: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> Step:
    def step() -> Tensor:
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled(module: nn.Module, backend: str) -> Any:
    return module if backend == "eager" else torch.compile(module, backend=backend)


def plain(size: Size, rank: int, backend: str) -> Step:
    """One process on the whole batch."""
    model = model_of(size)
    return training_step(compiled(model, backend), adamw(model), batch_of(size))


def plain_on_two_threads(size: Size, rank: int, backend: str) -> Step:
    """One process on the whole batch, with as many threads as the others have ranks."""
    torch.set_num_threads(WORLD_SIZE)
    return plain(size, rank, backend)


def ddp(size: Size, rank: int, backend: str) -> Step:
    model = DistributedDataParallel(model_of(size))
    return training_step(compiled(model, backend), adamw(model), share_of(batch_of(size), rank, size.num_ranks))


def fsdp(size: Size, rank: int, backend: str) -> Step:
    model, mesh = model_of(size), init_device_mesh(size.device, (size.num_ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return training_step(compiled(model, backend), adamw(model), share_of(batch_of(size), rank, size.num_ranks))


def tensor_parallel(size: Size, rank: int, backend: str) -> Step:
    """Megatron's splits of attention and MLP."""
    model, mesh = model_of(size), init_device_mesh(size.device, (size.num_ranks,), mesh_dim_names=("tp",))
    for block in model.blocks:
        split = dict.fromkeys(("query", "key", "value", "mlp_in"), ColwiseParallel())
        parallelize_module(block, mesh, {**split, "out": RowwiseParallel(), "mlp_out": RowwiseParallel()})
    # AdamW's foreach refuses DTensors and plain tensors in one group.
    is_split = [isinstance(each, DTensor) for each in model.parameters()]
    groups = [[p for p, split in zip(model.parameters(), is_split, strict=True) if split == kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, foreach=True)
    return training_step(compiled(model, backend), optimizer, batch_of(size))


def pipeline(size: Size, rank: int, backend: str) -> Step:
    """Torch's 1F1B with the blocks cut evenly."""
    number, whole = size.layers // size.num_ranks, model_of(size).state_dict()
    with torch.device(size.device):
        part = GPT(size, rank * number, (rank + 1) * number).to(size.dtype)
    part.load_state_dict(
        {name: whole[_BLOCK.sub(lambda found: f"blocks.{int(found[1]) + rank * number}", name)] for name in part.state_dict()}
    )
    del whole
    stage = PipelineStage(compiled(part, backend), rank, size.num_ranks, next(part.parameters()).device)
    schedule, batch, optimizer = Schedule1F1B(stage, microbatches_of(size), loss_fn=loss_of), batch_of(size), adamw(part)

    def step() -> Tensor:
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": batch["labels"], "losses": losses} if rank == size.num_ranks - 1 else {}
        schedule.step(*([] if rank else [batch["tokens"]]), **given)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach().mean() if losses else torch.tensor(torch.nan)

    return step


def microbatches_of(size: Size) -> int:
    return min(NUM_MICROBATCHES, size.batch)


class ParallelStep:
    """A step of autopar's, which knows how long it was blocked: the user's loop, or `train_step` where it was compiled for that."""

    def __init__(self, parallel: autopar.ParallelModule, batch: Mapping[str, Tensor], trains: bool) -> None:
        self._parallel = parallel
        self._step = partial(parallel.train_step, **batch) if trains else training_step(parallel, adamw(parallel), batch)

    def __call__(self) -> Tensor:
        return self._step()

    @property
    def waited(self) -> float:
        """In seconds, since the first step; nothing on a virtual mesh, where nobody waits."""
        return getattr(self._parallel._world, "waited_seconds", 0.0)


def waited(step: Step) -> float | None:
    """Seconds that a step's rank has been blocked in waits so far; None of a peer, which hides it."""
    return step.waited if isinstance(step, ParallelStep) else None


def ours(axis: str, size: Size, rank: int, backend: str, **more: Any) -> Step:
    """autopar on one axis, or on its own on one virtual rank."""
    batch = batch_of(size)
    mesh = autopar.virtual_mesh(dp=1) if axis == "one" else init_device_mesh(size.device, (size.num_ranks,), mesh_dim_names=(axis,))
    mine = share_of(batch, rank, size.num_ranks) if axis == "dp" else batch
    cluster = {"cluster": "cpu"} if size.device == "cpu" else {}
    options: dict[str, Any] = {"backend": backend, "timeout": 600, "cache": size.cache, **cluster, **options_of(axis, size), **more}
    return ParallelStep(autopar.compile(model_of(size), mesh, example_inputs=mine, **options), mine, "train_step" in options)


# The loop in one call: updates are part of the program, on the tensors that DTensors hold.
TRAINED: dict[str, Any] = {"optimizer": (torch.optim.AdamW, ADAMW), "train_step": autopar.TrainStep()}

# Both halves of the batch forward, then both backward: each computes while collectives of the other move.
HALVES: dict[str, Any] = {"num_microbatches": 2, "schedule": "gpipe"}


def options_of(axis: str, size: Size) -> dict[str, Any]:
    return {"num_microbatches": microbatches_of(size), "schedule": "1f1b"} if axis == "pp" else {}


def predicted_seconds(axis: str, size: Size) -> float:
    """Of a step on two ranks along `axis`, on paper, as `explain()` says it."""
    mesh = autopar.virtual_mesh(**{axis: WORLD_SIZE})
    options: dict[str, Any] = {"backend": "eager", "cluster": "cpu", **options_of(axis, size)}
    found = autopar.compile(model_of(size), mesh, example_inputs=batch_of(size), **options).compiled
    assert found.cost is not None
    return step_parts(found, found.cost).total


def without_buckets(size: Size, rank: int, backend: str) -> Step:
    """autopar on dp with a collective for each gradient."""
    options: dict[str, Any] = {"backend": backend, "cluster": "cpu"}
    planned = autopar.compile(model_of(size), autopar.virtual_mesh(dp=WORLD_SIZE), example_inputs=batch_of(size), **options).plan
    assert planned is not None
    return ours("dp", size, rank, backend, plan=replace(planned, buckets=dict.fromkeys(planned.buckets or {}, 0)))


def in_order(axis: str, size: Size, rank: int, backend: str, **more: Any) -> Step:
    """autopar without the passes that move communication: a collective for each tensor, begun and waited for where its result is read."""

    def decide(self: OverlapCommunication, program: ScheduleProgram) -> Overlap:
        return Overlap(None, reason="left as it is, to be compared with")

    def as_they_are(nodes: Sequence[Node]) -> tuple[list[Node], frozenset[Node]]:
        return list(nodes), frozenset()

    OverlapCommunication.decide, fragments.behind_launches = decide, as_they_are  # of this process alone
    options: dict[str, Any] = {"backend": backend, "cluster": "cpu", **options_of(axis, size), **more}
    planned = autopar.compile(model_of(size), autopar.virtual_mesh(**{axis: WORLD_SIZE}), example_inputs=batch_of(size), **options).plan
    assert planned is not None
    return ours(axis, size, rank, backend, plan=replace(planned, buckets=dict.fromkeys(planned.buckets or {}, 0)))


def choice(size: Size, rank: int, backend: str) -> Step:
    """autopar on the axis that its own prices say is the fastest."""
    return ours(min(("dp", "tp", "pp"), key=lambda axis: predicted_seconds(axis, size)), size, rank, backend)


# By what they are compared along: each peer, the first of them the one to beat, and ours. `one` is a single process, `any` the peers'
# best beside the axis that ours would choose, `threads` two ranks of one thread beside one process with two, `buckets` and the `overlap`s
# ours with itself.
JOBS: dict[str, dict[str, Callable[[Size, int, str], Step]]] = {
    "dp": {"DDP": ddp, "FSDP2": fsdp, "autopar dp": partial(ours, "dp")},
    "train_step": {"DDP": ddp, "autopar dp": partial(ours, "dp"), "autopar dp, train_step": partial(ours, "dp", **TRAINED)},
    "zero": {"FSDP2": fsdp, "DDP": ddp, "autopar, zero=3": partial(ours, "dp", zero=3)},
    "tp": {"torch tensor parallel": tensor_parallel, "autopar tp": partial(ours, "tp")},
    "pp": {"torch 1F1B": pipeline, "autopar 1F1B": partial(ours, "pp")},
    "any": {"DDP": ddp, "torch tensor parallel": tensor_parallel, "torch 1F1B": pipeline, "autopar, its choice": choice},
    "one": {"plain torch": plain, "autopar, one rank": partial(ours, "one")},
    "threads": {"plain torch, 2 threads": plain_on_two_threads, "DDP": ddp, "autopar dp": partial(ours, "dp")},
    "buckets": {"autopar dp, no buckets": without_buckets, "autopar dp": partial(ours, "dp")},
    "overlap dp": {"zero=3, in order": partial(in_order, "dp", zero=3), "autopar, zero=3": partial(ours, "dp", zero=3)},
    "overlap tp": {"tp, in order": partial(in_order, "tp"), "autopar tp": partial(ours, "tp")},
    "overlap tp in turns": {
        "tp, 2 microbatches, in order": partial(in_order, "tp", **HALVES),
        "autopar tp, 2 microbatches": partial(ours, "tp", **HALVES),
        "autopar tp": partial(ours, "tp"),
    },
    "overlap pp": {"1F1B, in order": partial(in_order, "pp"), "autopar 1F1B": partial(ours, "pp")},
}

# The jobs that are one process.
ONE_PROCESS = frozenset({"plain torch", "plain torch, 2 threads", "autopar, one rank"})
