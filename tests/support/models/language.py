"""Tiny language models with random weights, one function a model, by the name that transformers gives its `model_type`.

Decoders, decoders of experts, a state-space model, encoders, and encoders with decoders. Dropout is off; half of the models
get a padding mask. Layers are two where a model alternates between kinds of layers, else one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.support.models.zoo import HEADS, LENGTH, VOCABULARY, WIDTH, Batch, Case, bert, case, gpt2, llama, padding_mask, tokens

# Fields as most configurations spell them.
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def masked() -> Batch:
    return tokens() | {"attention_mask": padding_mask()}


def decoder(config: type, batch: Batch | None = None, **fields: Any) -> Case:
    """A causal language model of `config` and its fields."""
    model = transformers.AutoModelForCausalLM.from_config(config(**{"use_cache": False} | IDS | fields))
    return case(model, tokens() if batch is None else batch)


def encoder(config: type, **fields: Any) -> Case:
    """A masked language model of `config` and its fields, on padded samples."""
    return case(transformers.AutoModelForMaskedLM.from_config(config(**IDS | fields)), masked())


def translator(config: type, **fields: Any) -> Case:
    """An encoder with a decoder; the decoder's ids are the labels, shifted."""
    model = transformers.AutoModelForSeq2SeqLM.from_config(config(**{"use_cache": False, "decoder_start_token_id": 0} | IDS | fields))
    return case(model, masked())


# ---- decoders


def gpt_neox(num_layers: int = 1) -> Case:
    """Attention and MLP in parallel, rotary positions on a quarter of each head, fused qkv with heads outermost."""
    return decoder(transformers.GPTNeoXConfig, num_hidden_layers=num_layers, **SIZES)


def gptj(num_layers: int = 1) -> Case:
    """Rotary positions by interleaved pairs, gathered from a table."""
    sizes = {"n_layer": num_layers, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 2 * LENGTH}
    return decoder(transformers.GPTJConfig, rotary_dim=4, **sizes)


def opt(num_layers: int = 1) -> Case:
    """Learned positions that count the padding mask."""
    sizes = SIZES | {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0}
    return decoder(transformers.OPTConfig, masked(), num_hidden_layers=num_layers, **sizes)


def bloom(num_layers: int = 1) -> Case:
    """Slopes for positions, counted over the padding mask; fused qkv with heads outermost; written as baddbmm."""
    return decoder(transformers.BloomConfig, masked(), n_layer=num_layers, hidden_size=WIDTH, n_head=HEADS, vocab_size=VOCABULARY)


def mistral(num_layers: int = 1) -> Case:
    """A sliding window shorter than the sample, padded samples."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    return decoder(transformers.MistralConfig, masked(), num_hidden_layers=num_layers, **sizes)


def qwen2(num_layers: int = 1) -> Case:
    """Biases on q, k and v alone."""
    return decoder(transformers.Qwen2Config, num_hidden_layers=num_layers, num_key_value_heads=2, **SIZES)


def qwen3(num_layers: int = 1) -> Case:
    """A norm on each head of q and k."""
    return decoder(transformers.Qwen3Config, num_hidden_layers=num_layers, num_key_value_heads=2, head_dim=8, **SIZES)


def gemma(num_layers: int = 1) -> Case:
    """One key-value head, scaled embeddings, head dims that do not make up the width."""
    return decoder(transformers.GemmaConfig, num_hidden_layers=num_layers, num_key_value_heads=1, head_dim=16, **SIZES)


def gemma3_text(num_layers: int = 2) -> Case:
    """Windows and full attention in turn, each with rotary angles of its own; norms before and after; soft caps on the logits."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    config = {"num_hidden_layers": num_layers, "layer_types": [kinds[i % 2] for i in range(num_layers)], "final_logit_softcapping": 5.0}
    return decoder(transformers.Gemma3TextConfig, **config, **sizes)


def phi3(num_layers: int = 1) -> Case:
    """Fused qkv with 4 query heads and 2 key-value heads, fused gate and up."""
    return decoder(transformers.Phi3Config, num_hidden_layers=num_layers, num_key_value_heads=2, **SIZES)


def falcon(num_layers: int = 1) -> Case:
    """The large models' layout: grouped heads in a fused qkv, two norms, attention and MLP in parallel."""
    sizes = SIZES | {"ffn_hidden_size": 2 * WIDTH, "num_kv_heads": 2, "new_decoder_architecture": True}
    del sizes["intermediate_size"]
    return decoder(transformers.FalconConfig, num_hidden_layers=num_layers, **sizes)


def mpt(num_layers: int = 1) -> Case:
    """Slopes for positions, norms without bias, padded samples."""
    sizes = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": num_layers, "expansion_ratio": 2, "max_seq_len": LENGTH}
    return decoder(transformers.MptConfig, masked(), vocab_size=VOCABULARY, **sizes)


def olmo(num_layers: int = 1) -> Case:
    """Norms without parameters, clipped q, k and v."""
    return decoder(transformers.OlmoConfig, num_hidden_layers=num_layers, num_key_value_heads=HEADS, clip_qkv=0.05, **SIZES)


# ---- decoders of experts


def mixtral(num_layers: int = 1) -> Case:
    """Four experts, two a token, tokens sorted by expert as is the default; with the loss that balances the experts."""
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return decoder(transformers.MixtralConfig, num_hidden_layers=num_layers, num_key_value_heads=2, **SIZES, **experts)


def qwen2_moe(num_layers: int = 1) -> Case:
    """Four experts and a shared one with a gate, padded samples."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
    return decoder(
        transformers.Qwen2MoeConfig, masked(), num_hidden_layers=num_layers, num_key_value_heads=2, **SIZES, **experts,
        experts_implementation="batched_mm",
    )  # fmt: skip


def gpt_oss(num_layers: int = 2) -> Case:
    """Windows and full attention in turn with a sink per head; experts with biases, gate and up interleaved."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
    kinds = ["sliding_attention", "full_attention"]
    layers = {"num_hidden_layers": num_layers, "layer_types": [kinds[i % 2] for i in range(num_layers)]}
    return decoder(transformers.GptOssConfig, **layers, **sizes, **experts)


# ---- a state-space model


def mamba(num_layers: int = 1) -> Case:
    """A causal convolution and a scan that is written out step by step, hence short samples."""
    sizes = {"hidden_size": WIDTH, "state_size": 4, "time_step_rank": 4, "vocab_size": VOCABULARY}
    return decoder(transformers.MambaConfig, {key: value[:, :8] for key, value in tokens().items()}, num_hidden_layers=num_layers, **sizes)


# ---- encoders


def roberta(num_layers: int = 1) -> Case:
    """Positions counted over the ids that are no padding."""
    return encoder(transformers.RobertaConfig, num_hidden_layers=num_layers, **SIZES, **NO_DROPOUT)


def distilbert(num_layers: int = 1) -> Case:
    sizes = {"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_heads": HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH}
    return encoder(transformers.DistilBertConfig, n_layers=num_layers, dropout=0.0, attention_dropout=0.0, **sizes)


def albert(num_layers: int = 2) -> Case:
    """All layers share their weights; a narrow embedding is projected."""
    return encoder(transformers.AlbertConfig, num_hidden_layers=num_layers, embedding_size=16, **SIZES, **NO_DROPOUT)


def deberta(num_layers: int = 1) -> Case:
    """Attention to relative positions in both directions, gathered from logarithmic buckets."""
    relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
    share = {"share_att_key": True, "position_biased_input": False, "pooler_hidden_size": WIDTH}
    return encoder(transformers.DebertaV2Config, num_hidden_layers=num_layers, **relative, **share, **SIZES, **NO_DROPOUT)


def esm(num_layers: int = 1) -> Case:
    """Rotary positions in an encoder; masked tokens drop out of the embedding's scale."""
    special = {"mask_token_id": 3, "token_dropout": True, "position_embedding_type": "rotary"}
    return encoder(transformers.EsmConfig, num_hidden_layers=num_layers, **special, **SIZES, **NO_DROPOUT)


# ---- encoders with decoders


def t5(num_layers: int = 1) -> Case:
    """A learned bias for buckets of relative positions, attention without scale, a tied and scaled head."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_heads": HEADS, "vocab_size": VOCABULARY}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0}
    return translator(transformers.T5Config, num_layers=num_layers, num_decoder_layers=num_layers, **sizes, **buckets)


def _bart_sizes(num_layers: int) -> dict[str, Any]:
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (
        ("layers", num_layers), ("ffn_dim", 2 * WIDTH), ("attention_heads", HEADS),
    )}  # fmt: skip
    return sizes | {"d_model": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH, "dropout": 0.0}


def bart(num_layers: int = 1) -> Case:
    """Learned positions with an offset, cross attention, one embedding for both halves and the head."""
    return translator(transformers.BartConfig, **_bart_sizes(num_layers))


def marian(num_layers: int = 1) -> Case:
    """Sinusoidal positions, a bias on the logits that is no parameter."""
    return translator(transformers.MarianConfig, decoder_vocab_size=VOCABULARY, **_bart_sizes(num_layers))


ZOO: dict[str, Callable[..., Case]] = {
    "gpt2": gpt2, "gpt_neox": gpt_neox, "gptj": gptj, "opt": opt, "bloom": bloom, "llama": llama, "mistral": mistral, "qwen2": qwen2,
    "qwen3": qwen3, "gemma": gemma, "gemma3_text": gemma3_text, "phi3": phi3, "falcon": falcon, "mpt": mpt, "olmo": olmo,
    "mixtral": mixtral, "qwen2_moe": qwen2_moe, "gpt_oss": gpt_oss, "mamba": mamba, "bert": bert, "roberta": roberta,
    "distilbert": distilbert, "albert": albert, "deberta-v2": deberta, "esm": esm, "t5": t5, "bart": bart, "marian": marian,
}  # fmt: skip
