"""Who gets which layers."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.foresight.partition import cut
from autopar.foresight.work import Amount, Block, ModelWork, Part, Product


def model(num_layers: int, head: float = 0.0) -> ModelWork:
    def part(flops: float) -> Part:
        return Part([Product(Amount(0.0, flops), Amount(), False)])

    layer = Block("layer", num_layers, forward=part(1.0), is_layer=True)
    return ModelWork((Block("before"), layer, Block("after", forward=part(head))), 2)


def layers(work: ModelWork, num_stages: int, rule: str) -> list[int]:
    return [sum(block.is_layer for block in stage) for stage in cut(work, num_stages, rule)]


def test_layers_are_shared_out_evenly_and_the_ends_get_what_stands_there() -> None:
    stages = cut(model(7), 3, "layers")
    assert [[block.name for block in stage] for stage in stages] == [["before", *["layer"] * 3], ["layer"] * 2, [*["layer"] * 2, "after"]]


def test_the_ends_have_a_layer_less() -> None:
    assert layers(model(22), 8, "ends") == [2, 3, 3, 3, 3, 3, 3, 2]
    stages = cut(model(4), 6, "ends")
    assert [[block.name for block in stage] for stage in stages] == [["before"], *[["layer"]] * 4, ["after"]]


def test_by_cost_a_dear_head_takes_the_place_of_layers() -> None:
    assert layers(model(8), 2, "cost") == [4, 4]
    assert layers(model(8, head=4.0), 2, "cost") == [6, 2]


def test_past_its_share_the_block_that_exceeds_it_stays() -> None:
    """As nanotron builds models: the first stages have a layer more, and the loss may be alone on the last."""
    assert layers(model(8), 3, "cost") == [2, 3, 3]
    assert layers(model(8), 3, "past cost") == [3, 3, 2]
    assert layers(model(4, head=4.0), 4, "past cost") == [3, 1, 0, 0]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"4 stages want a layer each, and the model has 3 layers: use pp · chunks ≤ 3"):
        cut(model(3), 4, "layers")
