"""The GPT of the examples: causal, and its loss is the cross entropy of its logits."""

from __future__ import annotations

import math

import pytest
import torch
from gpt import GPT


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(num_symbols=16, num_layers=2, width=32, num_heads=4, max_length=12)


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens = small(), torch.randint(16, (3, 12))
    labels = tokens.roll(-1, dims=1)
    logits = model(tokens)
    assert logits.shape == (3, 12, 16)
    expected = -torch.log_softmax(logits, dim=2).gather(2, labels[:, :, None]).mean()
    torch.testing.assert_close(model(tokens, labels=labels), expected)
    assert abs(expected.item() - math.log(16)) < 0.2


def test_a_position_does_not_see_what_follows() -> None:
    model, tokens = small(), torch.randint(16, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 16
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-4


def test_dropout_acts_in_training_only() -> None:
    model = GPT(num_symbols=16, num_layers=1, width=32, num_heads=4, max_length=12, dropout=0.5)
    tokens = torch.randint(16, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width of 30 does not divide over 4 heads"):
        GPT(num_symbols=16, num_layers=1, width=30, num_heads=4, max_length=8)
