"""Which blocks each stage of a pipeline gets, by the rule of a profile. A stage may be left empty where a rule does so."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.foresight.work import Block, ModelWork

Stages = tuple[tuple[Block, ...], ...]


def cut(work: ModelWork, num_stages: int, rule: str) -> Stages:
    """Raises `PlanError` where there are more stages than layers."""
    blocks = work.expanded()
    most = work.num_layers + (2 if rule == "ends" else 0)
    if num_stages > max(most, 1):
        raise PlanError(f"{num_stages} stages want a layer each, and the model has {work.num_layers} layers: use pp · chunks ≤ {most}")
    if num_stages == 1:
        return (tuple(blocks),)
    return _by_cost(blocks, num_stages, rule == "past cost") if "cost" in rule else _by_layers(blocks, num_stages, rule == "ends")


def _by_layers(blocks: Sequence[Block], num_stages: int, spares_ends: bool) -> Stages:
    """As many layers each, the first ones one more where they do not divide; `spares_ends` gives both ends one fewer than the others."""
    num_layers = sum(block.is_layer for block in blocks)
    wanted = num_layers + (2 if spares_ends else 0)
    shares = [wanted // num_stages + (stage < wanted % num_stages) for stage in range(num_stages)]
    if spares_ends:
        shares[0], shares[-1] = shares[0] - 1, shares[-1] - 1
    stages: list[list[Block]] = [[] for _ in shares]
    at = taken = 0
    left = num_layers
    for block in blocks:
        if block.is_layer and taken == shares[at] and at + 1 < num_stages:
            at, taken = at + 1, 0
        if left == 0:  # the head
            at = num_stages - 1
        left -= block.is_layer
        taken += block.is_layer
        stages[at].append(block)
    return tuple(map(tuple, stages))


def _by_cost(blocks: Sequence[Block], num_stages: int, goes_past: bool) -> Stages:
    """The next stage begins with the block by which the products with parameters so far exceed the shares of the stages before, or, where
    it `goes_past`, with the one after it: the rule of nanotron (github:huggingface/nanotron src/nanotron/models/base.py, build_model). What
    the last blocks leave over is the last's."""
    costs = [sum(each.flops.of(1.0) for each in block.forward.products if not each.is_attention) for block in blocks]
    stages: list[list[Block]] = [[] for _ in range(num_stages)]
    at, so_far = 0, 0.0
    for block, cost in zip(blocks, costs, strict=True):
        so_far += cost
        is_full = at + 1 < num_stages and so_far > sum(costs) * (at + 1) / num_stages * (1 + 1e-9)
        if not goes_past:
            at += is_full
        stages[at].append(block)
        if goes_past:
            at += is_full
    return tuple(map(tuple, stages))
