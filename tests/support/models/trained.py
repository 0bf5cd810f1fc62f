"""A small language model in float64 throughout, and optimizers that torch does not have: what whole training steps are tested on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH, SAMPLES = 32, 16, 8, 8


class Block(nn.Module):
    """Queries, keys and values of one projection, `fused`, or of one each: only those lie in plain shards."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.norm = nn.LayerNorm(WIDTH)
        # A key's bias has a gradient of zero: optimizers that divide by its size would step by rounding.
        widths = (3 * WIDTH,) if fused else (WIDTH, WIDTH, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, each, bias=False) for each in widths)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        parts = self.qkv[0](normed).chunk(3, dim=-1) if self.fused else [each(normed) for each in self.qkv]
        heads = (each.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2) for each in parts)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class SmallGpt(nn.Module):
    """Blocks, and a head that is tied to the embedding."""

    def __init__(self, num_blocks: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1), labels.flatten())


def small_gpt(dtype: torch.dtype = torch.float64, num_blocks: int = 1, fused: bool = True) -> SmallGpt:
    torch.manual_seed(0)
    return SmallGpt(num_blocks, fused).to(dtype)


def batch(number: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    """The `number`-th of a run; some labels are ignored."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[: samples // 2, : number % 4] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


class Layers(nn.Module):
    """Four layers, and something to hold of what they give. In a file of tests pytest rewrites assertions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        assert (x.abs() < 0.999).all(), "too large"
        return x.square().mean()


class TwoLayers(nn.Module):
    """Four parameters of different shapes, for inputs of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


class Lamb(torch.optim.Optimizer):
    """Adam with each parameter's step scaled by the norms of the parameter and of the step (arXiv:1904.00962): a statistic of wholes."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                state["step"] += 1
                state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                mean, square = state["mean"] / (1 - 0.9 ** state["step"]), state["square"] / (1 - 0.99 ** state["step"])
                change = mean / (square.sqrt() + 1e-6) + group["weight_decay"] * parameter
                parameter.add_(change * (parameter.norm() / change.norm()), alpha=-group["lr"])


class Lars(torch.optim.Optimizer):
    """Momentum with each parameter's gradient scaled by the norms of both (arXiv:1708.03888): a statistic of wholes."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                trust = parameter.norm() / (parameter.grad.norm() + 1e-9)
                state["momentum"].mul_(group["momentum"]).add_(parameter.grad * trust * 0.01)
                parameter.add_(state["momentum"], alpha=-group["lr"])


class Sm3(torch.optim.Optimizer):
    """One statistic a row and a column (arXiv:1901.11150): maxima over wholes."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, others = (
                    self.state[parameter],
                    [[each for each in range(parameter.ndim) if each != dim] for dim in range(parameter.ndim)],
                )
                square = parameter.grad**2
                known = [state[dim] for dim in range(parameter.ndim)] if state else []
                if known:
                    least = known[0].expand_as(parameter)
                    for each in known[1:]:
                        least = torch.minimum(least, each.expand_as(parameter))
                    square = square + least
                for dim, away in enumerate(others):
                    state[dim] = square.amax(away, keepdim=True) if away else square.clone()
                parameter.add_(parameter.grad / (square.sqrt() + 1e-12), alpha=-group["lr"])


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's, for the matrices alone: it takes no others."""
    return torch.optim.Muon([each for each in parameters if each.ndim == 2], lr=0.02)
