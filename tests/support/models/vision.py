"""Tiny vision models with random weights: transformers over patches, with relative positions and with windows, and convnets.

Labels are ignored (-100) in unequal numbers over any split of the batch, as in `tests.support.models.zoo.vit`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers

from tests.support.models.zoo import BATCH, HEADS, IGNORED, WIDTH, Batch, Case, case, vit

IMAGE, CHANNELS, CLASSES = 32, 3, 12


def beit(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Relative positions looked up in a table, layer scale, no key bias, the mean over patches."""
    config = transformers.BeitConfig(
        num_hidden_layers=num_layers, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS, image_size=IMAGE,
        patch_size=8, num_labels=CLASSES, use_relative_position_bias=True, use_absolute_position_embeddings=True,
        drop_path_rate=0.0, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return case(transformers.BeitForImageClassification(config), images())


def swin(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Windows of 4 × 4, shifted (rolled and masked) in every other block; two stages, patches merged between them."""
    config = transformers.SwinConfig(
        image_size=IMAGE, patch_size=4, embed_dim=WIDTH, depths=[2 * num_layers, 2], num_heads=[HEADS, 2 * HEADS], window_size=4,
        mlp_ratio=2.0, num_labels=CLASSES, drop_path_rate=0.0, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return case(transformers.SwinForImageClassification(config), images())


def convnext(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Depthwise convolutions, layer norm over channels that come first and last, layer scale. It has no dropout."""
    del dropout
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[WIDTH, 2 * WIDTH], depths=[num_layers, 1], patch_size=4, image_size=IMAGE, num_labels=CLASSES,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    return case(transformers.ConvNextForImageClassification(config), images())


def resnet(num_layers: int = 1, dropout: float = 0.0) -> Case:
    """Bottlenecks with batch norm in training, strides and max pooling: statistics of the global batch. It has no dropout."""
    del dropout
    config = transformers.ResNetConfig(
        embedding_size=WIDTH // 2, hidden_sizes=[2 * WIDTH, 4 * WIDTH], depths=[num_layers, 1], num_labels=CLASSES
    )  # fmt: skip
    return case(transformers.ResNetForImageClassification(config), images())


ZOO: dict[str, Callable[..., Case]] = {"vit": vit, "beit": beit, "swin": swin, "convnext": convnext, "resnet": resnet}


def images() -> Batch:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=draw)
    labels[[3, 5, 6, 7]] = IGNORED
    return {"pixel_values": torch.randn(BATCH, CHANNELS, IMAGE, IMAGE, generator=draw), "labels": labels}
