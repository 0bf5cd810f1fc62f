"""Tiny transformers with random weights, and batches that are hard to get right.

Labels are ignored (-100) in unequal numbers: of 8 samples the first two keep all labels, the next two half of them, then
two keep three, the last two none. Over dp = 2 ranks count unequal numbers of labels; over dp = 4 the last has none left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 16, 96, 32, 4
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model in training mode, in float64 where nothing else is said, and a global batch for it."""

    model: nn.Module
    batch: Batch

    def to(self, dtype: torch.dtype) -> Case:
        """The same model, itself changed, and a batch, of floats in `dtype`."""
        batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.batch.items()}
        return Case(self.model.to(dtype), batch)


def gpt2(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Fused qkv, tied vocabulary head, gelu by tanh."""
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=2 * LENGTH, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return case(transformers.GPT2LMHeadModel(config), tokens())


def llama(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """4 query heads on 2 key-value heads, rotary positions, RMS norm. It has dropout in attention only."""
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=2 * LENGTH, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return case(transformers.LlamaForCausalLM(config), tokens())


def bert(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Norm after the residual sum, a padding mask, a key bias whose gradient is zero."""
    config = transformers.BertConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, vocab_size=VOCABULARY,
        max_position_embeddings=2 * LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return case(transformers.BertForMaskedLM(config), tokens() | {"attention_mask": padding_mask()})


def vit(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """A convolution cuts 16 patches, a class token makes it 17 positions; one label a sample."""
    config = transformers.ViTConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, image_size=32,
        patch_size=8, num_labels=12, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 12, (BATCH,), generator=draw)
    labels[[3, 5, 6, 7]] = IGNORED
    return case(
        transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=draw), "labels": labels}
    )


ZOO: dict[str, Callable[..., Case]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}


def tokens() -> Batch:
    """Ids and labels, both int64 [BATCH, LENGTH]."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=draw)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=draw)
    labels[2:4, LENGTH // 2 :] = IGNORED
    labels[4:6, 3:] = IGNORED
    labels[6:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def padding_mask() -> Tensor:
    """1 where a sample has a token, int64 [BATCH, LENGTH]: every sample has one, none is padded on the left."""
    lengths = torch.tensor([16, 12, 16, 9, 5, 16, 2, 16])
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def case(model: nn.Module, batch: Batch) -> Case:
    """The models' own initial weights, with noise on all: zero biases and unit norms would hide a parameter that lies wrongly.

    Larger noise would make attention sharp, and the key bias's gradient, zero by cancellation, all rounding.
    """
    draw = torch.Generator().manual_seed(2)
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    return Case(model, batch).to(torch.float64)
