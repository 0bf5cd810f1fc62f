"""Models that ask for gradients of values which they compute from their inputs, as transformers' speech models do for checkpointing."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.support.captures import compiled


class Asks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.layer, self.how = nn.Conv1d(1, 8, 3), nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None] if self.how != "input" else x
        if self.how == "attribute":
            h.requires_grad = True
        elif self.how == "parameter":
            self.conv.weight.requires_grad_()
        else:
            h.requires_grad_()
        h = h.view(-1, 1, 16)
        h = 2 * h if h.requires_grad else h
        return self.layer(self.conv(h).relu().mean(-1)).square().mean()


@pytest.mark.parametrize(("how", "backend"), [("attribute", "inductor"), ("method", "eager")])
def test_what_asks_in_vain_is_passed_over(how: str, backend: str) -> None:
    x = torch.randn(4, 16)
    parallel = compiled(Asks(how), {"dp": 2}, (x,), backend=backend)
    assert parallel.verify(x)
    assert not x.requires_grad


@pytest.mark.parametrize("how", ["input", "parameter"])
def test_inputs_and_parameters_are_not_to_be_changed(how: str) -> None:
    model = Asks(how)
    model.conv.weight.requires_grad_(False)
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        compiled(model, {"dp": 2}, (torch.randn(4, 16),))
    assert not model.conv.weight.requires_grad


def test_a_speech_model_is_trained_and_split() -> None:
    config = transformers.HubertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=5,
        mask_time_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
        final_dropout=0.0, classifier_proj_size=16,
    )  # fmt: skip
    model = transformers.HubertForSequenceClassification(config).train()
    batch = {"input_values": torch.randn(4, 400), "labels": torch.tensor([0, 1, 2, 3])}
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch, backend="eager")
    assert parallel.verify(**batch)
    assert parallel.summary()["flops_split"] == 1.0
