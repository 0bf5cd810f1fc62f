"""How others place pipeline stages: whole layers, counted. For comparison with `place`, which prices.

`boundaries` are the first unit of every layer, and last the first unit behind the last layer; what is before the first layer
(embeddings) goes with it, what is behind the last (norm, head, loss) with that. All return the first unit of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.pipeline.placement import Devices, Line, Unit, place


def equal_layers(boundaries: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """As many layers for each stage, one more for the first ones where they do not divide. Raises `PlanError` for too few layers."""
    counts = _even(len(boundaries) - 1, num_stages)
    if not min(counts):
        raise _too_few(counts)
    return _by_counts(boundaries, counts)


def equal_parameters(boundaries: Sequence[int], parameter_bytes: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Whole layers, and what is before and behind them as one more each, so that the largest stage has the fewest parameters.

    `parameter_bytes[u]` are those of unit u. DeepSpeed's rule: `PipelineModule(partition_method="parameters")`, its default.
    Raises `PlanError` for too few layers.
    """
    starts = sorted({0, *boundaries} - {len(parameter_bytes)})
    ends = [*starts[1:], len(parameter_bytes)]
    pieces = tuple(Unit(f"piece {n}", sum(parameter_bytes[b:e]), 0.0) for n, (b, e) in enumerate(zip(starts, ends, strict=True)))
    return tuple(starts[piece] for piece in place(Line(pieces), Devices.equal(num_stages), [1] * num_stages).starts)


def weighted_layers(boundaries: Sequence[int], num_stages: int, input_weight: int = 1, output_weight: int = 1) -> tuple[int, ...]:
    """As many layers for each stage, where what is before the first counts as `input_weight` layers, what is behind the last as
    `output_weight`.

    torchtitan's rule and its defaults: `generate_llm_fqn_per_model_part` in torchtitan/distributed/pipeline_parallel.py (02ef790).
    Raises `PlanError` where it refuses: a stage without a layer, or with less than a weight.
    """
    num_layers = len(boundaries) - 1
    if num_stages == 1:
        return (0,)
    counts = _even(num_layers + input_weight + output_weight, num_stages)
    if min(counts) < max(input_weight, output_weight, 1):
        raise PlanError(
            f"{num_layers} layers and weights of {input_weight} and {output_weight} make {sum(counts)} for {num_stages} stages, "
            f"{min(counts)} for the smallest: less than a weight; use fewer stages"
        )
    counts[0] -= input_weight
    counts[-1] -= output_weight
    return _by_counts(boundaries, counts)


def _even(number: int, num_stages: int) -> list[int]:
    return [number // num_stages + (stage < number % num_stages) for stage in range(num_stages)]


def _by_counts(boundaries: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Stages of so many layers. The first may have the embeddings alone, the last the head alone, where there are such units."""
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    starts = (0, *(boundaries[first] for first in firsts[1:]))
    if list(starts) != sorted(set(starts)) or 0 in counts[1:-1]:
        raise _too_few(counts)
    return starts


def _too_few(counts: Sequence[int]) -> PlanError:
    return PlanError(f"{sum(counts)} layers are too few for {len(counts)} stages of {list(counts)} layers; use fewer stages")
