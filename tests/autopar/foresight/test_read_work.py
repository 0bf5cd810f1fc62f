"""What is read off the graph, against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.doors.measure_work import measure_work
from autopar.foresight.work import Block, ModelWork
from benchmarks.published_gpts import gpt
from benchmarks.published_models import GPT

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 8192, 2048, 16, 512, 5
LAYER_FLOPS = 24 * LENGTH * WIDTH**2 + 4 * LENGTH**2 * WIDTH


def work(samples: int = 2) -> ModelWork:
    with torch.device("meta"):
        model = GPT(VOCABULARY, LAYERS, WIDTH, HEADS, LENGTH)
        tokens = torch.zeros(samples, LENGTH, dtype=torch.int64)
    return measure_work(model, {"tokens": tokens, "labels": tokens}, "8xA100")


@pytest.fixture(scope="module")
def whole() -> ModelWork:
    return work()


def layer(found: ModelWork) -> Block:
    return [block for block in found.blocks if block.is_layer][-1]


def test_equal_layers_are_captured_thrice_and_counted_as_often_as_there_are(whole: ModelWork) -> None:
    layers = [("blocks.0", 1), ("blocks.1", LAYERS - 2), ("blocks.2", 1)]
    assert [(block.name, block.count) for block in whole.blocks] == [("before", 1), *layers, ("after", 1)]
    assert whole.num_layers == LAYERS


def test_layers_have_the_products_of_the_formula(whole: ModelWork) -> None:
    block = layer(whole)
    assert block.forward.flops.of(3) == pytest.approx(3 * LAYER_FLOPS)
    backward = block.input_gradient.flops.of(3) + block.weight_gradient.flops.of(3)
    assert backward == pytest.approx(2 * 3 * LAYER_FLOPS)
    assert block.weight_gradient.flops.of(3) == pytest.approx(3 * 24 * LENGTH * WIDTH**2)
    assert block.core.flops.of(3) == pytest.approx(3 * 4 * LENGTH**2 * WIDTH)


def test_the_head_is_after_the_layers_and_tied_parameters_are_held_at_both_ends(whole: ModelWork) -> None:
    before, after = whole.blocks[0], whole.blocks[-1]
    assert after.forward.flops.of(1) == pytest.approx(2 * LENGTH * WIDTH * VOCABULARY)
    assert before.parameters == {"symbols.weight": VOCABULARY * WIDTH, "positions.weight": LENGTH * WIDTH}
    assert after.parameters["symbols.weight"] == VOCABULARY * WIDTH
    assert layer(whole).num_parameters == 12 * WIDTH**2 + 13 * WIDTH


def test_one_capture_holds_for_microbatches_of_any_size(whole: ModelWork) -> None:
    other = work(samples=4)
    for ours, theirs in zip(whole.blocks, other.blocks, strict=True):
        for part in ("forward", "input_gradient", "weight_gradient", "core"):
            for amount in ("flops", "eager_bytes", "fused_bytes"):
                found, wanted = getattr(getattr(ours, part), amount), getattr(getattr(theirs, part), amount)
                assert (found.fixed, found.per_sample) == pytest.approx((wanted.fixed, wanted.per_sample)), (ours.name, part, amount)
        assert ours.saved.of(7) == pytest.approx(theirs.saved.of(7))


def test_fusion_saves_traffic_and_kernels_and_leaves_products_alone(whole: ModelWork) -> None:
    forward = layer(whole).forward
    assert forward.fused_bytes.of(1) < forward.eager_bytes.of(1)
    assert forward.fused_kernels < forward.eager_kernels


def test_megatrons_split_with_its_sequence_split_sends_two_values_a_layer_and_direction() -> None:
    width, length = 6144, 2048
    hidden = 2.0 * length * width
    block = layer(gpt(width, 64, 3, length, 8, splits_sequence=True))
    assert block.forward.flops.of(1) == pytest.approx((24 * length * width**2 + 4 * length**2 * width) / 8)
    sent = [(each.collective, each.input.of(1), each.output.of(1)) for each in block.forward.transfers]
    assert sent == 2 * [("all_gather", hidden / 8, hidden), ("reduce_scatter", hidden, hidden / 8)]
    assert block.inputs.of(1) == hidden / 8


def test_full_recomputation_keeps_the_inputs_of_a_layer_and_selective_drops_the_scores(whole: ModelWork) -> None:
    block = layer(whole)
    assert block.inputs.of(1) == 2 * LENGTH * WIDTH
    scores = 2.0 * HEADS * LENGTH**2
    assert block.saved.of(1) - block.saved_outside_core.of(1) >= scores


def test_a_model_without_layers_is_one_block() -> None:
    found = measure_work(nn.Linear(8, 4), (torch.zeros(2, 8),), "8xA100")
    assert [block.name for block in found.blocks] == ["after"]
    assert found.blocks[0].forward.flops.of(1) == 2 * 8 * 4


def test_layers_that_differ_are_not_taken_for_equal() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.ReLU())
    found = measure_work(nn.Sequential(model, nn.Linear(4, 4)), (torch.zeros(2, 8),), "8xA100")
    assert sum(block.forward.flops.of(1) for block in found.expanded()) == 2 * (3 * 64 + 32 + 16)


class Tied(nn.Module):
    """The first layer reads the table's rows and nothing else of what stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.symbols(tokens)
        for block in self.blocks:
            x = block(x).relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def test_a_table_is_before_the_layers_and_labels_are_with_the_loss() -> None:
    with torch.device("meta"):
        model, tokens = Tied(), torch.zeros(2, 8, dtype=torch.int64)
    blocks = {block.name: block for block in measure_work(model, {"tokens": tokens, "labels": tokens}, "8xA100").blocks}
    before, first, after = blocks["before"], blocks["blocks.0"], blocks["after"]
    assert before.parameters == after.parameters == {"symbols.weight": 64 * 16} and "symbols.weight" not in first.parameters
    hidden, scores = 2.0 * 8 * 16, 4.0 * 8 * 64
    assert before.saved.of(1) == after.inputs.of(1) == hidden
    # The softmax in float32 and a few values a token: whether a label is a class is asked again.
    assert scores <= after.saved.of(1) < 1.1 * scores + hidden
    assert after.eager_working >= after.fused_working >= scores / 2


def test_what_is_gathered_for_products_can_be_left_out_of_what_is_kept() -> None:
    width, length, tp = 6144, 2048, 8
    block = layer(gpt(width, 64, 3, length, tp, splits_sequence=True))
    assert block.gathered.of(1) == pytest.approx(2 * 2.0 * length * width * (1 - 1 / tp), rel=0.15)
    assert layer(gpt(width, 64, 3, length, tp, splits_sequence=False)).gathered.of(1) < 1e-3 * block.gathered.of(1)
