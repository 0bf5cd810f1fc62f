"""What a Llama as people load it (SDPA, a cache of keys and values), and the models of the zoo, must not keep for their backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import autopar
from autopar import virtual_mesh
from autopar.ir.markers import save
from autopar.kernels.attention import attention
from benchmarks.saved_bytes import MODELS, program_of, waste

aten = torch.ops.aten


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "tp": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"tp": 4}, {"pp": 2}))], ids=str
)
def test_grouped_heads_are_not_copied_and_an_empty_cache_is_gone(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa", **sizes))
    assert model.config.use_cache
    ids = torch.randint(0, 96, (4, 16))
    batch = {"input_ids": ids, "labels": ids}
    parallel = autopar.compile(model, virtual_mesh(**axes), example_inputs=batch, backend="eager")
    graph = parallel.compiled.program.graph
    calls = [node for node in graph.nodes if node.target is attention]
    assert [tuple(operand.meta["val"].shape[1] for operand in call.args[:3]) for call in calls] == [(4, 2, 2)] * 2
    # Rotary embeddings double their angles: of keys and values there is no `cat`.
    joined = [operand for node in graph.nodes if node.target is aten.cat.default for operand in node.all_input_nodes]
    assert joined and all(operand.meta["val"].shape[0] == 1 for operand in joined)
    assert parallel.verify(promote=True, **batch)
    assert parallel.summary()["flops_split"] >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_model_keeps_copies_of_what_is_expanded_or_joins_nothing(name: str) -> None:
    assert waste(program_of(name, 1)[0]) == []


def test_such_waste_is_told() -> None:
    graph, x = torch.fx.Graph(), torch.ones(1, 8)
    nodes = {"x": graph.placeholder("x")}
    nodes["x"].meta["val"] = x
    for name, op, args, value in (
        ("wide", aten.expand.default, ("x", [4, 8]), x.expand(4, 8)),
        ("copy", aten.clone.default, ("wide",), x.expand(4, 8).clone()),
        ("view", save, ("wide",), x.expand(4, 8)),
        ("kept", save, ("copy",), x.expand(4, 8).clone()),
        ("none", aten.slice.Tensor, ("x", 0, 0, 0), x[:0]),
    ):
        nodes[name] = graph.create_node(
            "call_function", op, tuple(nodes.get(each, each) if isinstance(each, str) else each for each in args), name=name
        )
        nodes[name].meta["val"] = value
    both = graph.create_node("call_function", aten.cat.default, ([nodes["x"], nodes["none"]],), name="both")
    both.meta["val"] = x
    assert waste(SimpleNamespace(graph=graph)) == ["both joins nothing", "kept keeps what wide expands"]
