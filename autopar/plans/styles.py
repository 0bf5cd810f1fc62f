"""Pins from the dicts of styles that `torch.distributed.tensor.parallel.parallelize_module` takes.

    pins={"model.layers.*.mlp.up_proj": ColwiseParallel(),
          "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
          "model.norm": ("tp", SequenceParallel())}             the axis by name; "tp" where none is given

    style             weight of nn.Linear    nn.Embedding    transformers' Conv1D    bias     output
    ColwiseParallel   dim 0                  dim 1           dim 1                   dim 0    output_layouts, the last dim
    RowwiseParallel   dim 1                  dim 0           dim 0                   whole    output_layouts, whole
    SequenceParallel  parameters of any module whole                                          sequence_dim

What a layer reads is brought into the layout that it needs, so that `input_layouts` has nothing to say here; and code between the
layers sees whole shapes, not those of a rank's part (`use_local_output`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from autopar.errors import PlanError, UnmatchedPinError
from autopar.ir.pattern import matches_module, near_names
from autopar.plans.plan import DimPin, Pins, Plan

AXIS = "tp"
Pin = tuple[DimPin, ...]
# What `compile` takes: pins, styles, or styles with the axis that they split.
UserPins = Mapping[str, Sequence[DimPin] | ParallelStyle | tuple[str, ParallelStyle]]


def without_styles(pins: UserPins | Plan | None, model: nn.Module) -> Pins | Plan | None:
    """`pins` with every style as pins of the parameters and outputs of the modules of `model` that it is for; the others as they are.

    Raises `PlanError` naming every style that cannot be expressed: no module matches, one of a kind that it does not split, a layout
    that is none, or two styles that split one tied parameter differently.
    """
    if pins is None or isinstance(pins, Plan):
        return pins
    translation = _Translation(dict(model.named_modules()), {id(each): name for name, each in model.named_parameters()})
    for pattern, pin in pins.items():
        translation.add(pattern, pin)
    if translation.problems:
        kind = UnmatchedPinError if translation.has_unmatched else PlanError
        raise kind("styles that cannot be kept:\n" + "\n".join(f"  {problem}" for problem in translation.problems))
    return translation.pins


@dataclass
class _Translation:
    """`names` has the name under which each parameter, by its id, is known: the first of tied ones."""

    modules: Mapping[str, nn.Module]
    names: Mapping[int, str]
    pins: dict[str, Sequence[DimPin]] = field(default_factory=dict[str, Sequence[DimPin]])
    problems: list[str] = field(default_factory=list[str])
    has_unmatched: bool = False
    _by_style: dict[str, tuple[str, Pin]] = field(default_factory=dict[str, tuple[str, Pin]])

    def add(self, pattern: str, pin: Sequence[DimPin] | ParallelStyle | tuple[str, ParallelStyle]) -> None:
        axis, style = _with_axis(pin)
        if style is None and isinstance(pin, str):
            self.problems.append(
                f"{pattern!r} is pinned to the word {pin!r}: pass a style of torch.distributed.tensor.parallel (ColwiseParallel(), …), or "
                'the axis, or None, of each dim: ("tp", None)'
            )
            return
        if style is None:
            assert not isinstance(pin, ParallelStyle)
            self._set(pattern, pin)  # type: ignore[arg-type]
            return
        paths = [path for path in self.modules if path and matches_module(path, pattern)]
        if not paths:
            self.has_unmatched = True
            self.problems.append(f"{pattern!r} matches no module; there are {near_names(pattern, filter(None, self.modules))}")
        for path in paths:
            try:
                self._add_module(path, style, axis)
            except _Refusal as refusal:
                self.problems.append(f"{type(style).__name__} at {path!r}: {refusal}")

    def _add_module(self, path: str, style: ParallelStyle, axis: str) -> None:
        module = self.modules[path]
        for name, pin in _parameters(module, style, axis):
            known = self.names[id(module.get_parameter(name))]
            other, earlier = self._by_style.setdefault(known, (path, pin))
            if earlier != pin:
                raise _Refusal(f"its {name} is {known!r}, which {other!r} wants as {earlier}, and this as {pin}; use one style for both")
            self._set(known, pin)
        output = _output(style, axis)
        self._set(path, output)

    def _set(self, name: str, pin: Sequence[DimPin]) -> None:
        self.pins.pop(name, None)  # a later pin overrides: it belongs at the end
        self.pins[name] = pin


class _Refusal(Exception):
    """Why a style cannot be expressed."""


def _with_axis(pin: object) -> tuple[str, ParallelStyle | None]:
    if isinstance(pin, ParallelStyle):
        return AXIS, pin
    if isinstance(pin, (tuple, list)) and len(pin) == 2 and isinstance(pin[1], ParallelStyle):
        return str(pin[0]), pin[1]
    return AXIS, None


def _parameters(module: nn.Module, style: ParallelStyle, axis: str) -> Iterator[tuple[str, Pin]]:
    """The pins of the parameters of `module`, by their names in it."""
    if isinstance(style, SequenceParallel):
        yield from ((name, ()) for name, _ in module.named_parameters())
        return
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    is_column = isinstance(style, ColwiseParallel)
    kind = _kind(module)
    if kind is None:
        raise _Refusal(
            f"it splits nn.Linear, nn.Embedding and transformers' Conv1D, and this is a {type(module).__name__}; pin its parameters"
        )
    # A linear layer stores [out, in]; a table [words, width], and a Conv1D [in, out], the other way round.
    is_first_dim = is_column == (kind == "linear")
    yield "weight", (axis, None) if is_first_dim else (None, axis)
    if getattr(module, "bias", None) is not None:
        yield "bias", (axis,) if is_column else ()


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "table"
    is_transposed = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return "transposed" if is_transposed else None


def _output(style: ParallelStyle, axis: str) -> Pin:
    """The pin of what the module returns."""
    if isinstance(style, SequenceParallel):
        return _layout(style.sequence_sharding, axis)
    if isinstance(style, PrepareModuleOutput):
        return _layout(style.desired_output_layouts, axis)
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return _layout(style.output_layouts, axis)
    raise _Refusal(
        "pins say how parameters and what modules return lie, not what they read: drop it, as every reader gets its layout, "
        "or pin the output of the module that makes the value"
    )


def _layout(layouts: Sequence[object], axis: str) -> Pin:
    """One placement as a pin; the dims that it does not name are whole."""
    if len(layouts) != 1 or not isinstance(layouts[0], Placement):
        raise _Refusal(f"{len(layouts)} layouts; a pin speaks of one tensor on one axis")
    (layout,) = layouts
    if isinstance(layout, Replicate):
        return ()
    if type(layout) is not Shard:
        raise _Refusal(f"{type(layout).__name__} is no layout that a value can be held in; use Shard or Replicate")
    if layout.dim < 0:
        return (..., axis, *[None] * (-layout.dim - 1))
    return (*[None] * layout.dim, axis, ...)
