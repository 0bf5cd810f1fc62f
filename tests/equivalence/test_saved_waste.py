"""What a Llama as people load it (SDPA, a cache of keys and values) must not keep for its backward."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import autopar
from autopar import virtual_mesh
from autopar.kernels.attention import attention

aten = torch.ops.aten


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 4}, {"pp": 2}], ids=str)
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
