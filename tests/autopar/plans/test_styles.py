"""Dicts for `parallelize_module` as pins: what each style says of each kind of layer, and what cannot be said."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from autopar.errors import PlanError
from autopar.ir.keys import DIMS, SHARDING, SOURCE
from autopar.ir.markers import pinned
from autopar.plans.plan import Plan
from autopar.plans.styles import without_styles
from tests.support.models.residual import Residual, batch, parallel_residual
from tests.support.models.zoo import gpt2, llama

COLUMN, ROW, SEQUENCE = ColwiseParallel(), RowwiseParallel(), RowwiseParallel(output_layouts=Shard(1))


def test_linear_layers_and_tables() -> None:
    assert without_styles({"table": ROW, "blocks.0.mlp.up": COLUMN, "blocks.0.mlp.down": SEQUENCE, "head": COLUMN}, Residual()) == {
        "table.weight": ("tp", None),
        "table": (),
        "blocks.0.mlp.up.weight": ("tp", None),
        "blocks.0.mlp.up.bias": ("tp",),
        "blocks.0.mlp.up": (..., "tp"),
        "blocks.0.mlp.down.weight": (None, "tp"),
        "blocks.0.mlp.down.bias": (),
        "blocks.0.mlp.down": (None, "tp", ...),
        "head.weight": ("tp", None),
        "head": (..., "tp"),
    }
    assert without_styles({"table": COLUMN}, Residual()) == {"table.weight": (None, "tp"), "table": (..., "tp")}


def test_the_axis_may_be_named_and_plain_pins_pass() -> None:
    pins = {"blocks.*.norm": ("cp", SequenceParallel(sequence_dim=2)), "head.weight": ("dp", None), "batch": ("dp", "tp")}
    found = without_styles(pins, Residual(1))
    assert found == {
        "blocks.0.norm.weight": (),
        "blocks.0.norm.bias": (),
        "blocks.0.norm": (None, None, "cp", ...),
        "head.weight": ("dp", None),
        "batch": ("dp", "tp"),
    }
    plan = Plan(parallel_residual().mesh)
    assert without_styles(None, Residual()) is None and without_styles(plan, Residual()) is plan


def test_a_transposed_layer_of_transformers() -> None:
    found = without_styles({"transformer.h.*.mlp.c_fc": COLUMN, "transformer.h.*.mlp.c_proj": ROW}, gpt2().model)
    assert isinstance(found, dict)
    assert found["transformer.h.0.mlp.c_fc.weight"] == (None, "tp") and found["transformer.h.0.mlp.c_fc.bias"] == ("tp",)
    assert found["transformer.h.0.mlp.c_proj.weight"] == ("tp", None) and found["transformer.h.0.mlp.c_proj.bias"] == ()


def test_tied_parameters_take_one_style() -> None:
    model = gpt2().model
    found = without_styles({"transformer.wte": ROW, "lm_head": COLUMN}, model)
    assert isinstance(found, dict)
    assert found["transformer.wte.weight"] == ("tp", None) and "lm_head.weight" not in found
    with pytest.raises(PlanError, match=r"its weight is 'transformer.wte.weight', which 'transformer.wte' wants as \(None, 'tp'\)"):
        without_styles({"transformer.wte": COLUMN, "lm_head": COLUMN}, model)


def test_what_is_said_later_counts() -> None:
    found = without_styles({"head.weight": (None, "tp"), "*": (), "head": COLUMN}, Residual(1))
    assert isinstance(found, dict)
    assert list(found) == ["*", "head.weight", "head"] and found["head.weight"] == ("tp", None)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"blocks.*.mlp.upp": COLUMN}, r"'blocks.\*.mlp.upp' matches no module; there are blocks.0.mlp.up, "),
        ({"blocks.*.norm": COLUMN}, "ColwiseParallel at 'blocks.1.norm': it splits nn.Linear, nn.Embedding and .* this is a LayerNorm"),
        ({"head": "colwise"}, r"'head' is pinned to the word 'colwise': pass a style of .* or None, of each dim: \("),
        ({"head": ColwiseParallel(output_layouts=Partial())}, r"Partial.* is no layout that a value can be held in"),
        (
            {"blocks.0.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())},
            "PrepareModuleInput at 'blocks.0.mlp': pins say how parameters and what modules return lie, not what they read",
        ),
        (
            {"head": PrepareModuleOutput(output_layouts=(Shard(1), Shard(1)), desired_output_layouts=(Replicate(), Replicate()))},
            "2 layouts; a pin speaks of one tensor",
        ),
    ],
)
def test_refuses_what_pins_cannot_say(pins: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        without_styles(pins, Residual())


def test_an_output_is_brought_into_the_desired_layout() -> None:
    style = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-2))
    assert without_styles({"blocks.0.mlp": style}, Residual()) == {"blocks.0.mlp": (..., "tp", None)}


def test_a_style_dict_gives_megatrons_split() -> None:
    styles = {
        "table": SEQUENCE,
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.mlp.up": COLUMN,
        "blocks.*.mlp.down": SEQUENCE,
        "head": ("tp", COLUMN),
    }
    parallel = parallel_residual(pins=styles)
    found = {name: str(placement) for name, placement in parallel.plan.parameters.items()}
    assert found["blocks.1.mlp.up.weight"] == "[64@tp, 16]" and found["blocks.1.mlp.up.bias"] == "[64@tp]"
    assert found["blocks.1.mlp.down.weight"] == "[16, 64@tp]" and found["blocks.1.mlp.down.bias"] == "[16]"
    assert found["table.weight"] == found["head.weight"] == "[32@tp, 16]" and found["blocks.0.norm.weight"] == "[16]"
    nodes = [node for node in parallel.compiled.program.graph.nodes if node.target is pinned]
    outputs = {SOURCE[node].module: SHARDING[node][0].describe(DIMS[node][0]) for node in nodes}
    assert outputs["blocks.0.mlp.down"] == outputs["blocks.0.norm"] == outputs["table"] == "[4@dp, 8@tp, 16]"
    assert outputs["blocks.0.mlp.up"] == "[4@dp, 8, 64@tp]" and outputs["head"] == "[4@dp, 8, 32@tp]"
    assert parallel.verify(*batch(), promote=True)


def test_the_dict_of_llama_pins_what_megatron_splits() -> None:
    layer = "model.layers.*."
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    found = without_styles({layer + name: COLUMN for name in columns} | {layer + name: ROW for name in rows}, llama(2).model)
    assert isinstance(found, dict)
    weights = {name: pin for name, pin in found.items() if name.endswith(".weight")}
    assert len(weights) == 2 * (len(columns) + len(rows))
    assert all(pin == ((None, "tp") if name[15:-7] in rows else ("tp", None)) for name, pin in weights.items())


def test_a_subclass_of_a_layer_is_split_as_the_layer() -> None:
    class Wide(nn.Linear):
        pass

    assert without_styles({"0": COLUMN}, nn.Sequential(Wide(2, 4, bias=False))) == {"0.weight": ("tp", None), "0": (..., "tp")}
