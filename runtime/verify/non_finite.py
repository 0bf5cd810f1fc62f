"""Where a value that is infinite or NaN first appears in a call: every rank's program run node by node, as `verify` runs it.

scores = q @ k          finite
scores = scores + mask  -inf, where the mask is: meant, and gone behind the softmax
h = exp(8 * h)          inf     ← here: operands are finite, and the loss comes of it
loss = h - h.mean()     NaN
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar.driver.compiled import Compiled
from autopar.graph.autocast import autocast_off
from autopar.ir.arguments import arguments
from autopar.ir.collectives import is_launch
from autopar.ir.keys import PHASE, STAGE
from autopar.ir.program import Program
from autopar.runtime.module.captures import Captured
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.module.module_state import ModuleState
from autopar.runtime.verify.compare_forms import case_of
from autopar.runtime.verify.compare_values import difference_at
from autopar.runtime.verify.reference_run import run_local, run_separated
from autopar.runtime.verify.verify import global_inputs, whole_model


def first_non_finite(
    parallel: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured, key: int, scale: float
) -> str:
    """Where the call of `captured` with these inputs, whose backward starts from `scale`, has its first value that is infinite or NaN,
    of which the loss or a gradient is made; "" where there is none.

    Memory and time are those of `verify`: it is for a step that has failed. Collective; the same text on every rank.
    """
    inputs, world = parallel.call_inputs(args, kwargs), parallel._world
    model = parallel._model if world.is_virtual else whole_model(parallel)
    args, kwargs = inputs.call() if world.is_virtual else global_inputs(parallel, inputs, captured.batch_dims)
    compiled = captured.compiled
    program = compiled.separated or compiled.local
    inputs = CallInputs.of(args, kwargs)
    case = case_of(model, inputs, key, {item.name: torch.full(item.shape, scale) for item in program.signature.inputs_of("tangent")})
    seen = _Seen(program)
    with autocast_off():
        (run_local if compiled.separated is None else run_separated)(program, case, seen)
    names = {str(index): name for index, name, _ in inputs.tensors}
    return world.gather(seen.told(names, compiled), "where a value is not finite")[0]


@dataclass
class _Seen:
    """By node, and by rank and microbatch, whether its values hold an infinity or NaN; none for those that are finite everywhere."""

    program: Program
    infinite: dict[Node, list[bool]] = field(default_factory=dict[Node, list[bool]])
    undefined: dict[Node, list[bool]] = field(default_factory=dict[Node, list[bool]])

    def __post_init__(self) -> None:
        self._inputs = {node: item for item, node in self.program.named_inputs()}

    def __call__(self, node: Node, values: Sequence[Any]) -> None:
        bad = [_peak(value) for value in values]
        if any(not math.isfinite(peak) for peak in bad):
            self.infinite[node] = [not math.isfinite(peak) for peak in bad]
        if any(math.isnan(peak) for peak in bad):
            self.undefined[node] = [math.isnan(peak) for peak in bad]

    def told(self, names: dict[str, str], compiled: Compiled) -> str:
        pairs = self.program.named_outputs()
        results = [node for item, node in pairs if item.kind in ("loss", "gradient") and node in self.infinite]
        behind = _behind(results, self.infinite.keys())
        for is_wanted in (self._appears, self._becomes_undefined):
            for node in self.program.graph.nodes:
                if node in behind and (places := is_wanted(node)):
                    what = "NaN" if node in self.undefined else "infinity"
                    if node in self._inputs:
                        item = self._inputs[node]
                        which = f"The call's {item.kind} {names.get(item.name, item.name)!r}"
                        return f"{which} has {'a' if what == 'NaN' else 'an'} {what} from the start"
                    found = difference_at(node, math.inf)
                    source, phase = found.source or "no line of the model's", PHASE.get(node) or "forward"
                    return f"The first {what} in the {phase} is %{found.node} at {source}, {self._where(node, places, compiled)}"
        return ""

    def _appears(self, node: Node) -> list[int]:
        """Where its value is not finite, and those that it is made of are; a number that the model names (-inf in a mask) is meant."""
        numbers = (each for each in arguments(node) if isinstance(each, (int, float)))
        is_constant = node in self._inputs and self._inputs[node].kind == "constant"
        return [] if is_constant or any(not math.isfinite(each) for each in numbers) else self._without(node, self.infinite)

    def _becomes_undefined(self, node: Node) -> list[int]:
        return self._without(node, self.undefined)

    def _without(self, node: Node, bad: dict[Node, list[bool]]) -> list[int]:
        """The places where `node` is bad and none of its operands."""
        if is_launch(node):
            return []  # it brings what another rank has
        operands = [bad[each] for each in node.all_input_nodes if each in bad]
        return [place for place, is_bad in enumerate(bad.get(node, ())) if is_bad and not any(each[place] for each in operands)]

    def _where(self, node: Node, places: Sequence[int], compiled: Compiled) -> str:
        mesh = self.program.mesh
        ranks, number, stage = mesh.ranks, mesh.num_microbatches, STAGE.get(node)
        # The program runs on every rank along pp here, and in the schedule where its stage is.
        pp = ranks.parts("pp")
        held = [each for each in places if stage is None or not pp or ranks.index(each // number, pp) == compiled.order.stages[stage]]
        microbatch = min(each % number for each in held or places)
        found = sorted({each // number for each in held or places if each % number == microbatch})
        text = f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(map(str, found))}"
        at = ", ".join(f"{axis} {index}" for axis, index in ranks.coordinates(found[0]).items())
        return f"on {text}{f' ({at})' if len(found) == 1 else ''}" + (f", microbatch {microbatch}" if number > 1 else "")


def _peak(value: Any) -> float:
    """The largest absolute value: infinite or NaN where one is."""
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    peaks = [float(torch.linalg.vector_norm(each.detach(), math.inf)) for each in tensors if _is_float(each)]
    return next((peak for peak in peaks if math.isnan(peak)), max(peaks, default=0.0))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel() > 0


def _behind(results: Sequence[Node], nodes: Iterable[Node]) -> set[Node]:
    """What `results` are made of by way of `nodes` alone."""
    allowed, found, pending = set(nodes), set[Node](), list(results)
    while pending:
        node = pending.pop()
        if node in allowed and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
