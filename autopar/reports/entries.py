"""The typed dicts that `summary` returns."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from autopar.pipeline.report import PipelineSummary
from autopar.reports.search import SearchSummary


class Replicated(TypedDict):
    """Equal ops of repeated layers whose work some axis does not split, and what they cost a rank.

    Among the axes `mb` says that every microbatch computes the same, `pp` that several stages do. `rule` is "written",
    "inferred by probing" or "none".
    """

    op: str
    module: str
    phase: str | None
    rule: str
    axes: list[str]
    count: int
    seconds: float
    bytes: float
    flops: float


class Inferred(TypedDict):
    """Equal ops of repeated layers that are split by a rule inferred by probing."""

    op: str
    module: str
    count: int


class StepSeconds(TypedDict):
    """Of one step on one rank, nothing overlapped; collectives by axis. In a pipeline `rank` is the place along `pp` of the slowest."""

    compute: float
    memory: float
    communication: dict[str, float]
    total: float
    rank: NotRequired[int]


class Flops(TypedDict):
    """The model's matmul, convolution and attention FLOPs, and the sum of those that all ranks execute."""

    original: float
    executed: float


class Recomputed(TypedDict):
    """What the backward computes again, and why. `seconds` a step, of the rank that spends most; `saved_bytes` of saved activations on a
    rank, and what they were if all were kept."""

    reason: str
    calls: int
    seconds: float
    saved_bytes: float
    saved_bytes_before: float


class Summary(TypedDict):
    """The costs of a compiled program.

    flops_split    the model's FLOPs over the sum of those that all ranks execute
    replicated     dearest first
    communication  axis → collective → {"forward", "backward", "count"}: bytes that a rank sends in a step; "pp" → "send" from stage
                   to stage
    memory         bytes of a rank: parameters, copies of them that are held all step, gradients, optimizer state, buffers, saved
                   activations
    pipeline       None without stages and microbatches
    search         None where nothing was searched
    recompute      None where all that the backward reads is kept
    """

    mesh: dict[str, int]
    flops_split: float
    flops: Flops
    replicated: list[Replicated]
    inferred: list[Inferred]
    communication: dict[str, dict[str, dict[str, float]]]
    memory: dict[str, float]
    seconds: StepSeconds
    pipeline: PipelineSummary | None
    search: SearchSummary | None
    recompute: Recomputed | None
