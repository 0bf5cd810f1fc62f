"""Train a byte-level GPT on real text, on any mesh of data-parallel and tensor-parallel ranks.

    python examples/train_gpt.py                                                      virtual 2 × 2 mesh, in this process
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh dp=2,tp=2                the same on four real ranks
    python examples/train_gpt.py --single                                             plain PyTorch
    python examples/train_gpt.py --save run --save-every 50 --resume                  goes on where it stopped, on any mesh

The model is plain PyTorch (gpt.py); the loop is in training.py.
"""

from __future__ import annotations

from gpt import GPT
from text import NUM_SYMBOLS
from torch import Tensor, nn
from training import Example, Options, train


def build_model(options: Options) -> nn.Module:
    return GPT(NUM_SYMBOLS, options.layers, options.width, options.heads, options.length, options.dropout)


def make_batch(windows: Tensor) -> dict[str, Tensor]:
    """int64 [B, T + 1] → the arguments of one call: each position is asked for the byte that follows it."""
    return {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


if __name__ == "__main__":
    train(Example(title="a byte-level GPT", build_model=build_model, make_batch=make_batch))
