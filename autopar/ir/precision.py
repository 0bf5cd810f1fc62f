"""In which dtypes a step computes, as the user asked for it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import AutoparError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MixedPrecision:
    """Float32 masters, computed with in a lower dtype.

    param   what contractions and attention compute in, and parameters are gathered in: torch.bfloat16, or torch.float16, whose gradients
            underflow: `train_step` scales the loss then, by `LossScale()` where it was told nothing else, and a plain loop by
            `parallel.scaler()`
    reduce  what gradients are summed over ranks in: `grad` by default, as Megatron-LM and torchtitan have it (FSDP2's own default is
            `param`)
    grad    what gradients are summed over the microbatches in, and wait for their update: float32 by default. The masters are float32,
            and so are `.grad` and what an optimizer gets: a sum in another dtype is cast once it is complete
    keep    patterns of module paths ("*.router", "head") that compute in float32

    Norms, softmax, exponentials, powers, sums and losses are in float32, as under torch's autocast on a GPU, on any device. Partial sums
    of activations (a row-split layer) are added up in `param`, as Megatron's are. Raises `AutoparError` for other dtypes.
    """

    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = None
    grad: torch.dtype = torch.float32
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        object.__setattr__(self, "reduce", self.grad if self.reduce is None else self.reduce)
        for name in ("param", "reduce", "grad"):
            dtype = getattr(self, name)
            if dtype not in _DTYPES:
                known = ", ".join(map(str, _DTYPES))
                raise AutoparError(f"MixedPrecision({name}={dtype!r}) is none of the dtypes that it knows: {known}")
        if self.grad not in (torch.float32, self.param) or (self.grad != torch.float32 and self.reduce != self.grad):
            raise AutoparError(
                f"MixedPrecision(param={self.param}, reduce={self.reduce}, grad={self.grad}) cannot be: gradients come in param, and are "
                "summed over microbatches in no lower dtype than over ranks; let grad be param or float32, and leave reduce out"
            )

    @staticmethod
    def of(asked: str | MixedPrecision | None) -> MixedPrecision | None:
        """From `precision=` of `autopar.compile`. Raises `AutoparError` for what is none."""
        if asked is None or isinstance(asked, MixedPrecision):
            return asked
        if asked == "bf16":
            return MixedPrecision()
        if asked == "fp16":
            return MixedPrecision(param=torch.float16)
        known = 'use "bf16", "fp16" or autopar.MixedPrecision(param=..., reduce=..., keep=[...])'
        raise AutoparError(f"precision={asked!r} is unknown; {known}")

    @property
    def needs_scale(self) -> bool:
        """Whether gradients are in float16 somewhere, where those of a loss that is not scaled vanish."""
        return torch.float16 in (self.param, self.reduce, self.grad)

    def keeps(self, module: str) -> bool:
        """Whether the module at this path, or one that it is in, computes in float32."""
        parts = module.split(".")
        paths = [".".join(parts[: number + 1]) for number in range(len(parts))]
        return any(fnmatch.fnmatchcase(path, pattern) for path in paths for pattern in self.keep)

    def content(self) -> dict[str, str | Sequence[str]]:
        """As a JSON value."""
        return {**{name: _name(getattr(self, name)) for name in ("param", "reduce", "grad")}, "keep": list(self.keep)}

    @staticmethod
    def of_content(content: Mapping[str, str | Sequence[str]] | None) -> MixedPrecision | None:
        """Read back what `content` gave."""
        if content is None:
            return None
        dtypes = {name: getattr(torch, str(value)) for name, value in content.items() if name != "keep"}
        return MixedPrecision(**dtypes, keep=tuple(content.get("keep", ())))

    def __str__(self) -> str:
        kept = f", float32 in {', '.join(self.keep)}" if self.keep else ""
        summed = _name(self.grad if self.reduce is None else self.reduce)
        return f"computes in {_name(self.param)}, gradients summed in {summed}, masters float32{kept}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
