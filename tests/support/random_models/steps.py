"""Training steps of a module, as anybody writes them, and what is seen of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.support.random_models.model import RandomModel

# By kind and name: ("loss", ""), ("output", "o0"), ("gradient", "p0"), ("buffer", "b0"). A gradient may be None.
Seen = dict[tuple[str, str], Tensor | None]


@dataclass(frozen=True)
class Step:
    """`values` numbers the batch, `size` is its number of samples where that is not the model's own.

    evaluates     forward alone, in eval mode, without gradients
    accumulates   its gradients stay, for the next step to add to
    """

    values: int
    size: int | None = None
    evaluates: bool = False
    accumulates: bool = False

    def __str__(self) -> str:
        size = f" of {self.size} samples" if self.size else ""
        return f"batch {self.values}{size}{', evaluated' * self.evaluates}{', gradients stay' * self.accumulates}"


def runs(model: RandomModel, step: Step) -> bool:
    """Whether plain torch can make this step."""
    try:
        take_steps(model.module(), model, (step,))
    except Exception:  # whatever torch raises
        return False
    return True


def take_steps(module: nn.Module, model: RandomModel, steps: Sequence[Step]) -> list[Seen]:
    """What each of `steps` shows, of the original or of what was compiled of it."""
    return [_evaluated(module, model, step) if step.evaluates else _trained(module, model, step) for step in steps]


def _evaluated(module: nn.Module, model: RandomModel, step: Step) -> Seen:
    module.eval()
    with torch.no_grad():
        seen = _results(module(**model.inputs_of(step.values, step.size)))
    module.train()
    return _copied(seen | _buffers(module))


def _trained(module: nn.Module, model: RandomModel, step: Step) -> Seen:
    """Forward, backward, and an update that is bounded, so that no later step is too large to compare."""
    seen = _results(module(**model.inputs_of(step.values, step.size)))
    loss = seen["loss", ""]
    assert loss is not None
    if loss.requires_grad:
        loss.backward()
    gradients: Seen = {("gradient", name): parameter.grad for name, parameter in module.named_parameters()}
    found = _copied(seen | gradients | _buffers(module))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad / (1 + parameter.grad.norm())
    if not step.accumulates:
        module.zero_grad()
    return found


def _results(returned: Tensor | dict[str, Tensor]) -> Seen:
    if isinstance(returned, Tensor):
        return {("loss", ""): returned}
    return {("loss", "") if name == "loss" else ("output", name): value for name, value in returned.items()}


def _buffers(module: nn.Module) -> Seen:
    return {("buffer", name): value for name, value in module.named_buffers()}


def _copied(seen: Seen) -> Seen:
    return {key: value if value is None else value.detach().clone() for key, value in seen.items()}


def differences(wanted: Sequence[Seen], got: Sequence[Seen], tolerance: float) -> list[str]:
    """In words, what of `wanted` is otherwise in `got`."""
    found: list[str] = []
    for number, (first, second) in enumerate(zip(wanted, got, strict=True)):
        for key in first:
            problem = difference(first[key], second[key], tolerance) if key in second else "missing"
            if problem:
                found.append(f"step {number}, {' '.join(key).strip()}: {problem}")
    return found


def difference(wanted: Tensor | None, got: Tensor | None, tolerance: float) -> str | None:
    """What a parameter that nothing reads has for a gradient, None or zeros, is one."""
    if wanted is None or got is None:
        is_zero = all(value is None or not value.any() for value in (wanted, got))
        return (
            None
            if is_zero
            else f"{'nothing' if wanted is None else 'numbers'} in plain torch, {'nothing' if got is None else 'numbers'} here"
        )
    if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
        return f"{list(wanted.shape)} {wanted.dtype} in plain torch, {list(got.shape)} {got.dtype} here"
    wanted, got = wanted.double(), got.double()
    if not torch.equal(wanted.isnan(), got.isnan()):
        return "NaN elsewhere"
    apart = torch.where(wanted == got, 0, (wanted - got).abs()).nan_to_num(0, posinf=torch.inf).max()
    size = wanted.nan_to_num(0).abs().max()
    return None if apart <= tolerance * max(1.0, float(size)) else f"off by {float(apart):.3g} of {float(size):.3g}"


def rounding_decides(model: RandomModel, steps: Sequence[Step], wanted: Sequence[Seen]) -> bool:
    """Whether the last bits of the parameters show in plain torch, too: equal numbers change places, what cancels is noise."""
    for seed in range(3):
        module, draw = model.module(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 1 + 1e-15 * torch.randint(-4, 5, parameter.shape, generator=draw)
        if differences(wanted, take_steps(module, model, steps), model.tolerance):
            return True
    return False
