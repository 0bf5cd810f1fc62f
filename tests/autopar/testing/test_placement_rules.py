"""What others do, by its outcome."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.testing.placement_rules import equal_layers, equal_parameters, weighted_layers

# Two units of embeddings, layers of three units, one unit of head.
EMBEDDING, LAYER = 2, 3


def boundaries(num_layers: int) -> list[int]:
    return [EMBEDDING + LAYER * layer for layer in range(num_layers + 1)]


def layers_of(starts: tuple[int, ...], num_layers: int) -> list[int]:
    """How many layers each stage has."""
    firsts = [0, *((start - EMBEDDING) // LAYER for start in starts[1:]), num_layers]
    return [end - begin for begin, end in zip(firsts, firsts[1:], strict=False)]


def test_equal_layers() -> None:
    assert equal_layers(boundaries(4), 2) == (0, 8)
    assert layers_of(equal_layers(boundaries(10), 4), 10) == [3, 3, 2, 2]
    assert equal_layers(boundaries(3), 1) == (0,)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="3 layers are too few for 4 stages"):
        equal_layers(boundaries(3), 4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "weights", "expected"),
    [
        (3, 2, (2, 2), [2, 1]),  # 7 in all: four for the first, of which its embeddings are two
        (32, 8, (1, 1), [4, 5, 4, 4, 4, 4, 4, 3]),  # 34 in all: the first two have five
        (32, 4, (1, 1), [8, 9, 8, 7]),
        (6, 8, (1, 1), [0, 1, 1, 1, 1, 1, 1, 0]),  # embeddings alone, head alone
        (5, 1, (1, 1), [5]),
    ],
)  # fmt: skip
def test_weighted_layers(num_layers: int, num_stages: int, weights: tuple[int, int], expected: list[int]) -> None:
    assert layers_of(weighted_layers(boundaries(num_layers), num_stages, *weights), num_layers) == expected


def test_a_weight_must_fit_into_a_stage() -> None:
    with pytest.raises(PlanError, match="4 layers and weights of 1 and 3 make 8 for 4 stages, 2 for the smallest"):
        weighted_layers(boundaries(4), 4, 1, 3)


def test_equal_parameters_lets_a_large_embedding_stand_alone() -> None:
    sizes = [30.0, 10.0] + [4.0, 4.0, 2.0] * 4 + [0.0]
    assert equal_parameters(boundaries(4), sizes, 2) == (0, EMBEDDING)
    assert equal_parameters(boundaries(4), sizes, 3) == (0, EMBEDDING, EMBEDDING + 2 * LAYER)
