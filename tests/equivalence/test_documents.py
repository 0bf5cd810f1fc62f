"""Training on packed documents: a small GPT whose attention compares ids, written out or by torch's op, is exact on any mesh."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar import Cluster

VOCABULARY, WIDTH, NUM_HEADS, LENGTH, BATCH = 32, 32, 4, 16, 4


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.by_torch = by_torch
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        if self.by_torch:
            out = F.scaled_dot_product_attention(query, key, value, mask)
        else:
            scores = (query @ key.mT * (WIDTH // NUM_HEADS) ** -0.5).masked_fill(~mask, -torch.inf)
            out = scores.softmax(-1) @ value
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class PackedGPT(nn.Module):
    """Documents begin after each token 0; nothing attends across them."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(by_torch)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        ids = (tokens < 1).cumsum(-1)
        mask = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=draw) for _ in range(2))
    # One document, two, one of a single token, and none that ends.
    tokens[0, 7], tokens[1, [3, 4, 11]], tokens[2, 15] = 0, 0, 0
    return {"tokens": tokens, "labels": labels.masked_fill(tokens == 0, -100)}


def packed_llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers packs by positions that restart, and compares them for the triangle as well."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=NUM_HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    tokens = batch()["tokens"]
    starts = torch.tensor([[0] * 16, [0] * 5 + [5] * 11, [0] + [1] * 7 + [8] * 8, [0] * 15 + [15]])
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH) - starts}


MODELS = {
    "written out": lambda: (PackedGPT(by_torch=False), batch()),
    "torch's": lambda: (PackedGPT(by_torch=True), batch()),
    "transformers": packed_llama,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_documents_are_operands_and_exact(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    mesh = autopar.virtual_mesh(dp=2, tp=2)
    parallel = autopar.compile(model, mesh, example_inputs=inputs, backend="eager", cluster=Cluster.ideal())
    for promote, tolerance in ((True, 1e-9), (False, 1e-4)):
        report = parallel.verify(promote=promote, **inputs)
        assert report and report.worst <= tolerance, str(report)
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()
    program = parallel.print_program(after="trace joint")
    # No mask; ids of queries and of keys; nothing to draw from.
    for op in ("attention", "attention_backward"):
        operands = rf"autopar\.{op}\(.*, None, %cumsum, %cumsum, None, None, None, .*is_causal=True"
        assert len(re.findall(operands, program)) == 1, program
    assert ".eq." not in program and "aten.eq" not in program
    if name == "written out":
        assert "; documents; " in parallel.explain(detail="all")
