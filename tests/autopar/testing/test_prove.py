"""The rules of every op instance that occurs in tiny Hugging Face models, and the prover's own parts."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node, map_arg

from autopar.frontend.capture import capture
from autopar.ir.keys import DIMS
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.sharding import Sharding
from autopar.ops.lookup import rule_of
from autopar.ops.strategies import strategies_of
from autopar.passes.forward.decompose_losses import DecomposeLosses
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.forward.unify_attention import UnifyAttention
from autopar.passes.global_.find_atoms import FindAtoms
from autopar.passes.global_.fold_no_ops import FoldNoOps
from autopar.passes.global_.merge_equal_calls import MergeEqualCalls
from autopar.passes.global_.trace_joint import TraceJoint
from autopar.passes.global_.views_of_chunks import ViewsOfChunks
from autopar.testing.prove import assemble, instance, prove, prove_strategy, take

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")
MESH = Mesh((("dp", 2), ("tp", 2)))
IDS = torch.arange(4 * 8).reshape(4, 8)


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=4, vocab_size=48, n_positions=10, use_cache=False)
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=4, vocab_size=48)
    mask = torch.ones(4, 8, dtype=torch.int64)
    return transformers.BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS, "attention_mask": mask}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=24, num_attention_heads=4, image_size=16, patch_size=8, num_labels=10
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}
PASSES = (DecomposeLosses(), UnifyAttention(), KeyRandom(), TraceJoint(), ViewsOfChunks(), FoldNoOps(), MergeEqualCalls(), FindAtoms())


@cache
def joint(name: str) -> Program:
    model, inputs = MODELS[name]()
    program = capture(model.train(), (), inputs, MESH)
    for each in PASSES:
        program = each.apply(program)
    return program


def distinct_calls(*names: str) -> Iterator[Node]:
    """One node of each op, literals and operand atoms that occur."""
    seen: set[str] = set()
    for node in (node for name in names for node in joint(name).graph.nodes):
        if node.op != "call_function":
            continue
        literals = map_arg((node.args, node.kwargs), lambda operand: DIMS[operand])
        key = f"{node.target} {literals}"
        if key not in seen:
            seen.add(key)
            yield node


def test_every_op_has_a_rule_that_is_written_by_hand() -> None:
    rules = {str(node.target): rule_of(node) for node in distinct_calls(*MODELS)}
    assert not [name for name, rule in rules.items() if rule is None or rule.inferred]


def test_every_instance_is_proved() -> None:
    assert [failure for node in distinct_calls(*MODELS) for failure in prove(node)] == []


@pytest.mark.parametrize("name", MODELS)
def test_random_strategies_on_two_axes_are_exact(name: str) -> None:
    draw, failures = random.Random(0), []
    for node in draw.sample(list(distinct_calls(name)), 40):
        strategy = draw.choice(strategies_of(node, MESH))
        failures += prove_strategy(node, strategy, MESH)
    assert failures == []


def test_take_and_assemble_are_inverse() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    dims = ((2, 6), (4,))
    value = torch.randn(12, 4, dtype=torch.float64)
    for sharding in (
        Sharding(((), (), ())),
        Sharding((("dp",), ("tp",), ())),
        Sharding(((), ("tp", "dp"), ())),
        Sharding(((), ("dp", "tp"), ())),
        Sharding((("dp",), (), ())),
    ):
        parts = [take(value, dims, sharding, mesh, rank) for rank in range(mesh.size)]
        assert {tuple(part.shape) for part in parts} == {sharding.local_shape(dims, mesh)}
        assert torch.equal(assemble(parts, dims, sharding, mesh), value)


@pytest.mark.parametrize(("kind", "want"), [("sum", 11.0), ("max", 5.0)])
def test_assemble_reduces(kind: Any, want: float) -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    parts = [torch.tensor([number]) for number in (1.0, 5.0, 2.0, 3.0)]
    assert assemble(parts, ((),), Sharding((), (("dp", kind), ("tp", kind))), mesh).item() == want


def test_failures_name_the_op_the_factor_and_the_size_of_the_error() -> None:
    node = instance(torch.ops.aten.mm.default, torch.empty(4, 6), torch.empty(6, 8))
    strategy = next(found for found in strategies_of(node, Mesh((("x", 2),))) if str(found) == "x:k")
    wrong = type(strategy)(strategy.operands, (Sharding(((), ())),), strategy.factors)
    (failure,) = prove_strategy(node, wrong, Mesh((("x", 2),)))
    assert "aten.mm.default" in failure and "x:k" in failure and "differs between ranks 0 and 1" in failure
