"""Train an unmodified `transformers` Llama, made from a configuration, on the bytes of real text. Needs `pip install transformers`.

python examples/train_llama.py                                                    virtual 2 × 2 mesh, in this process
torchrun --nproc-per-node 4 examples/train_llama.py --mesh dp=2,tp=2              the same on four real ranks
python examples/train_llama.py --single                                           plain PyTorch
"""

from __future__ import annotations

from text import NUM_SYMBOLS
from torch import Tensor, nn
from training import Example, Options, train
from transformers import LlamaConfig, LlamaForCausalLM


def build_model(options: Options) -> nn.Module:
    """Four query heads share a key-value head. Llama itself has no dropout but the attention's."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_SYMBOLS,
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=max(1, options.heads // 4),
            max_position_embeddings=options.length,
            attention_dropout=options.dropout,
            use_cache=False,  # a training step returns no key-value cache
        )
    )


def make_batch(windows: Tensor) -> dict[str, Tensor]:
    """int64 [B, T + 1] → the arguments of one call; Llama shifts the labels itself."""
    tokens = windows[:, :-1].contiguous()
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    train(Example(title="a byte-level Llama", build_model=build_model, make_batch=make_batch))
