"""All decisions of one compile as a value: it prints, goes to JSON and back, and can be edited and run again.

    {
      "version": 1,
      "mesh": {"dp": 2, "tp": 2},
      "freedom": {"batch": ["dp"], "flexible": [], "shards_parameters": false},
      "pinned": ["h.0.mlp"],
      "fingerprint": "9f0c…",
      "parameters": {"h.0.fc.weight": {"dims": [[32], [64]], "splits": [[], ["tp"]]}},
      "inputs": {"batch 0": {…}},
      "strategies": {"forward h.0.fc aten.mm 0": {"operands": […], "results": […], "factors": {"dp": "m", "tp": "n"}, "num_shards": 4}},
      "precision": null,
      "kernels": {},
      "buckets": {"dp": 26214400},
      "chunks": {"forward h.0.mlp.c_fc all_gather 1": 4},
      "recomputed": ["forward h.0 aten.gelu.default 0"],
      "offloaded": {"memory": "host", "buffers": [["gelu_default@0", "gelu_default@1"]]},
      "schedule": {"num_microbatches": 4, "text": ["pipeline 1f1b: …", "rank 0 | 0F0 …", …], "cuts": ["forward h.2 aten.add.Tensor 0"]},
      "reasons": {"h.0.fc.weight": "split dim 1 over tp (column)"}
    }

A sharding is a list with the axes of each atom, and what is unreduced. Nodes are known by phase, module path, op and
ordinal, parameters by their original names; the fingerprint says for which graph the node decisions are valid.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import EllipsisType
from typing import Protocol

from torch.fx import Node

from autopar.errors import PlanError, ScheduleError
from autopar.ir.actions import PipelineSchedule
from autopar.ir.freedom import Freedom
from autopar.ir.keys import DIMS, SHARDING, SOURCE, STRATEGY
from autopar.ir.markers import pinned
from autopar.ir.mesh import Mesh, parent
from autopar.ir.offload import Away
from autopar.ir.padding import Padding, carried_over
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Program
from autopar.ir.sharding import Dims, Sharding, Strategy
from autopar.plans.diff import Offloaded, PlanDiff
from autopar.plans.json import (
    Json,
    PlacementEntry,
    PlanEntry,
    from_freedom,
    from_schedule,
    from_sharding,
    from_strategy,
    indented,
    to_dims,
    to_freedom,
    to_schedule,
    to_sharding,
    to_strategy,
)
from autopar.plans.keys import cut_keys, fingerprint, node_keys

# One entry per dim of a parameter or of a module's output, by name or pattern: an axis, several (major first), or None; `...` for
# the dims between. See `autopar.plans.pins`.
DimPin = str | Sequence[str] | EllipsisType | None
Pins = Mapping[str, Sequence[DimPin]]

logger = logging.getLogger("autopar")
VERSION = 1


class Reasoned(Protocol):
    """A decision that says why, by parameter name or node key."""

    @property
    def reasons(self) -> Mapping[str, str]: ...


class Staged(Reasoned, Protocol):
    """Where the stages of a pipeline begin: the first op of each but the first, by node name."""

    @property
    def cuts(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class PlannedInput:
    """How an input lies: its atoms, dim by dim, with their padding, and its sharding."""

    dims: Dims
    sharding: Sharding
    padding: Padding | None = None

    def __str__(self) -> str:
        return self.sharding.describe(self.dims)


@dataclass(frozen=True)
class Plan:
    """Every decision of one compile. Pins are a plan with parameters alone.

    mesh         the axes as decided upon, sub-axes included
    parameters   placements by original name; `inputs` those of batch, buffers and the rest, by kind and name
    strategies   the strategy of every node, by `node_keys`; valid on the graph with `fingerprint` only
    kernels      "triton" or "aten", of each attention of the FORWARD program on a GPU, by `node_keys`
    schedule     which rank of a pipeline runs which microbatch of which stage when; None where there is nothing to order
    cuts         the first op of each stage but the first, by `node_keys`, reshards included
    reasons      why, in words, by parameter name or node key
    freedom      which axes were let split the batch, and whether its axes were let split parameters, or had to (ZeRO)
    buckets      by the axes of collectives ("dp") the most bytes of those that go together
    precision    what the step computes in, where that was asked for
    pinned       the modules whose outputs were pinned: the graph has a node for each
    recomputed   the calls of the forward that the backward does once more, by `node_keys`, reshards included
    chunks       the collectives that go piece by piece with the products beside them, by `node_keys` of the LOCAL program, and in how many
                 pieces; None where nobody decided
    offloaded    what lies elsewhere than on the device meanwhile; None where nobody asked
    stored       where parameters lie, "host" or "file", if not on the device; when that has copies of them follows from the schedule
    """

    mesh: Mesh
    parameters: Mapping[str, PlannedInput] = field(default_factory=dict[str, PlannedInput])
    inputs: Mapping[str, PlannedInput] = field(default_factory=dict[str, PlannedInput])
    strategies: Mapping[str, Strategy] = field(default_factory=dict[str, Strategy])
    fingerprint: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    schedule: PipelineSchedule | None = None
    cuts: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    freedom: Freedom = Freedom()
    pinned: tuple[str, ...] = ()
    buckets: Mapping[str, int] = field(default_factory=dict[str, int])
    precision: MixedPrecision | None = None
    recomputed: tuple[str, ...] = ()
    offloaded: Offloaded | None = None
    chunks: Mapping[str, int] | None = None
    stored: Away | None = None

    @staticmethod
    def of(program: Program, decision: Reasoned | None = None, stages: Staged | None = None) -> Plan:
        """The decisions in a GLOBAL program whose nodes have strategies, before or after reshards; reasons from the search's `decision`.

        With `stages`, where it was cut into those of a pipeline, its order is a part of the plan.
        """
        placements = {
            (item.kind, item.name): PlannedInput(DIMS[node][0], SHARDING[node][0], item.padding) for item, node in program.named_inputs()
        }
        plan = Plan(
            mesh=program.mesh,
            parameters={name: placement for (kind, name), placement in placements.items() if kind == "parameter"},
            inputs={f"{kind} {name}": placement for (kind, name), placement in placements.items() if kind != "parameter"},
            strategies={key: STRATEGY[node] for node, key in node_keys(program).items() if node in STRATEGY},
            fingerprint=fingerprint(program),
            reasons=dict(decision.reasons) if decision else {},
            freedom=program.freedom,
            precision=program.precision,
            pinned=tuple(dict.fromkeys(SOURCE[node].module for node in program.graph.nodes if node.target is pinned)),
        )
        return plan if stages is None else plan._with_stages(program, stages)

    def _with_stages(self, program: Program, decision: Staged) -> Plan:
        reasons = {**self.reasons, **decision.reasons}
        return replace(self, schedule=program.order, cuts=cut_keys(program, decision.cuts), reasons=reasons)

    def starts_on(self, program: Program, units: Sequence[Sequence[Node]], num_stages: int) -> tuple[int, ...] | None:
        """The first of `units`, the calls of a line, of each stage of the plan; None where it has none, or others than fit here.

        Says in the log what does not fit.
        """
        if self.schedule is None:
            return None
        numbers = {node: number for number, nodes in enumerate(units) for node in nodes}
        nodes = {key: node for node, key in node_keys(program, with_reshards=True).items() if node in numbers}
        missing = next((key for key in self.cuts if key not in nodes), None)
        starts = (0, *(numbers[nodes[key]] for key in self.cuts)) if missing is None else ()
        if len(starts) == num_stages and all(one < other for one, other in itertools.pairwise(starts)):
            return starts
        others = f"it has {len(self.cuts) + 1} stages, this call {num_stages}" if len(starts) != num_stages else "no stage may be empty"
        why = f"there is no {missing!r}" if missing else others
        logger.warning("the plan's stages do not fit: %s; they are placed anew", why)
        return None

    def pins(self) -> Plan:
        """The parameters' placements alone: what may be carried to another graph of the same model."""
        reasons = {name: why for name, why in self.reasons.items() if name in self.parameters}
        return Plan(self.mesh, self.parameters, reasons=reasons, freedom=self.freedom, precision=self.precision)

    def refines(self, program: Program) -> bool:
        """Whether it was made for the graph of `program`, on its mesh or on one with axes of it broken into sub-axes."""
        whole = dict[str, int]()
        for axis, size in self.mesh.axes:
            whole[parent(axis)] = whole.get(parent(axis), 1) * size
        return bool(self.strategies) and tuple(whole.items()) == program.mesh.axes and self.fingerprint == fingerprint(program)

    def fits(self, program: Program) -> bool:
        """Whether the node decisions are valid on `program`: same mesh, same graph. Says in the log why not."""
        if self.strategies and self.mesh == program.mesh and self.fingerprint == fingerprint(program):
            return True
        if self.strategies:
            other = f"another mesh ({self.mesh}; here {program.mesh})" if self.mesh != program.mesh else "another graph"
            logger.warning("the plan was made for %s: only its %d parameter pins apply", other, len(self.parameters))
        return False

    def strategies_on(self, program: Program) -> dict[Node, Strategy]:
        """The strategy of every call of `program`. Raises `PlanError` when the plan lacks some; ask `fits` first."""
        keys = node_keys(program)
        missing = [key for key in keys.values() if key not in self.strategies]
        if missing:
            raise PlanError(
                f"the plan has no strategy for {len(missing)} of {len(keys)} nodes, the first is {missing[0]!r}; compile without it"
            )
        return {node: self.strategies[key] for node, key in keys.items()}

    def placements_on(self, program: Program) -> dict[str, Sharding]:
        """The shardings of those parameters of `program` that the plan pins.

        Raises `PlanError` with every pin that cannot be kept: other atoms, axes that are not on the mesh, or
        sizes that do not divide. Names that the model lacks are a warning.
        """
        found, problems = dict[str, Sharding](), list[str]()
        items = {item.name: (item, node) for item, node in program.named_inputs() if item.kind == "parameter"}
        for name, placement in self.parameters.items():
            if name not in items:
                continue
            item, node = items[name]
            dims = DIMS[node][0]
            sharding = carried_over(placement.sharding, (placement.dims, dims), (placement.padding, item.padding), program.mesh)
            if sharding is None:
                problems.append(f"{name!r} is pinned by atoms {_plain(placement.dims)}, here it has {_plain(dims)}")
                continue
            problems += [f"{name!r} {sharding.describe(dims)}: {problem}" for problem in sharding.problems(dims, program.mesh)]
            found[name] = sharding
        unknown = [name for name in self.parameters if name not in items]
        if unknown:
            logger.warning("the plan pins %d parameters that the model does not have, the first is %r", len(unknown), unknown[0])
        if problems:
            raise PlanError(
                "pins that cannot be kept:\n" + "\n".join(f"  {problem}" for problem in problems) + "\npin another dim, or drop the pin"
            )
        return found

    def diff(self, other: Plan) -> PlanDiff:
        """What is otherwise in `other`: it prints, repeated layers as one line, and is truthy when something differs."""
        return PlanDiff.between(self, other)

    def to_json(self) -> str:
        """As text; `from_json` reads it back to an equal plan."""
        return indented(self.content())

    def content(self) -> dict[str, Json]:
        """As a JSON value."""
        return {
            "version": VERSION,
            "mesh": dict(self.mesh.axes),
            "freedom": from_freedom(self.freedom),
            "pinned": self.pinned,
            "fingerprint": self.fingerprint,
            "parameters": {name: _from_placement(placement) for name, placement in self.parameters.items()},
            "inputs": {name: _from_placement(placement) for name, placement in self.inputs.items()},
            "strategies": {key: from_strategy(strategy) for key, strategy in self.strategies.items()},
            "precision": self.precision and self.precision.content(),
            "kernels": dict(self.kernels),
            "buckets": dict(self.buckets),
            "chunks": None if self.chunks is None else dict(self.chunks),
            "schedule": from_schedule(self.schedule, self.cuts),
            "recomputed": self.recomputed,
            "offloaded": self.offloaded and {"memory": self.offloaded.memory, "buffers": self.offloaded.buffers},
            "stored": self.stored,
            "reasons": dict(self.reasons),
        }

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read back what `to_json` wrote. Raises `PlanError` for text that is none, naming what is wrong with it."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is no JSON: {error}") from error
        return Plan.of_content(content)

    @staticmethod
    def of_content(content: PlanEntry) -> Plan:
        """Read back what `content` gave, or an earlier release wrote. Raises `PlanError` for a value that is no plan."""
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise PlanError(f"the plan has version {version!r}, this release reads {VERSION}; compile anew and save that plan")
        try:
            return Plan(
                mesh=Mesh(tuple(content["mesh"].items())),
                freedom=to_freedom(content.get("freedom", {})),
                pinned=tuple(content.get("pinned", ())),
                parameters={name: _to_placement(entry) for name, entry in content["parameters"].items()},
                inputs={name: _to_placement(entry) for name, entry in content.get("inputs", {}).items()},
                strategies={key: to_strategy(entry) for key, entry in content.get("strategies", {}).items()},
                fingerprint=content.get("fingerprint", ""),
                precision=MixedPrecision.of_content(content.get("precision")),
                kernels=dict(content.get("kernels", {}).items()),
                buckets={axes: int(size) for axes, size in content.get("buckets", {}).items()},
                schedule=to_schedule(content.get("schedule")),
                cuts=tuple(schedule.get("cuts", ())) if (schedule := content.get("schedule")) else (),
                recomputed=tuple(content.get("recomputed", ())),
                chunks=content.get("chunks"),
                offloaded=Offloaded(away["memory"], tuple(map(tuple, away["buffers"]))) if (away := content.get("offloaded")) else None,
                stored=_to_place(content.get("stored")),
                reasons=content.get("reasons", {}),
            )
        except (KeyError, TypeError, AttributeError, ValueError, ScheduleError) as error:
            raise PlanError(f"the plan is malformed: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises `PlanError`, or `OSError` when there is no such file."""
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        width = max((len(name) for name in self.parameters), default=0)
        lines = [f"plan on {self.mesh}: {len(self.parameters)} parameters, {len(self.strategies)} ops"]
        lines += [f"  {self.precision}"] if self.precision is not None else []
        lines += [f"  {name:<{width}}  {placement}" for name, placement in self.parameters.items()]
        lines += [f"  {key}  by {kernel}" for key, kernel in self.kernels.items()]
        if self.schedule is not None:
            lines += [f"  {line}" for line in str(self.schedule).splitlines()]
            lines += [f"  stage {number} begins with {cut}" for number, cut in enumerate(self.cuts, 1)]
        return "\n".join(lines)


def _to_place(value: Json) -> Away | None:
    if value not in (None, "host", "file"):
        raise ValueError(f"parameters are stored in {value!r}")
    return value


def _plain(dims: Dims) -> str:
    return Sharding.replicated(dims).describe(dims)


def _from_placement(placement: PlannedInput) -> dict[str, Json]:
    unpadded: dict[str, Json] = {"unpadded": placement.padding.before} if placement.padding else {}
    return {"dims": placement.dims, **unpadded, **from_sharding(placement.sharding)}


def _to_placement(entry: PlacementEntry) -> PlannedInput:
    dims = to_dims(entry["dims"])
    return PlannedInput(dims, to_sharding(entry), Padding(to_dims(entry["unpadded"]), dims) if "unpadded" in entry else None)
