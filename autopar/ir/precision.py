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
    grad    what gradients are held in, float32 by default, or `param`: from the microbatch that makes them, through the sums over
            microbatches and calls that accumulate, to the update of `train_step`, which casts some at a time to float32, the dtype of
            the masters, and gives these to the optimizer. Those that come in float32, of norms and kept modules, are summed over
            microbatches as they come. In a plain loop `.grad` is float32: torch's optimizers take no two dtypes
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
        if self.grad not in (torch.float32, self.param):
            raise AutoparError(
                f"MixedPrecision(param={self.param}, grad={self.grad}) cannot be: gradients come in param, and are held as they come or in "
                "float32; let grad be param, or leave it out"
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
        reduce = self.grad if self.reduce is None else self.reduce
        over = f", over ranks in {_name(reduce)}" if reduce != self.grad else ""
        held = ", held so until the update" if self.grad != torch.float32 else ""
        return f"computes in {_name(self.param)}, gradients summed in {_name(self.grad)}{over}{held}, masters float32{kept}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
