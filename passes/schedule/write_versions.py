"""Several updates in a step: a pipeline that does not wait for itself, each microbatch with one version of the weights all the way.

The first of two stages, "stash", an update after every microbatch:

ADD w.v0 (w)                                    a copy of its own, for microbatches that are under way when w is updated
RUN f0 (x@0, w.v0) -> (h@0)                     0F0
RUN f0 (x@1, w.v0) -> (h@1)                     0F1
RUN f1 (d@0, x@0, w.v0) -> (w_grad@0)           0B0
ADD w_grad.sum.u0 (w_grad@0)
UPDATE (w) by (w_grad.sum.u0) -> (w.v1)
RUN f0 (x@2, w.v1) -> (h@2)                     0F2, of the newest version
RUN f1 (d@1, x@1, w.v0) -> (w_grad@1)           0B1, of the version of 0F1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.errors import PlanError
from autopar.ir.actions import PipelineSchedule, parse_action
from autopar.ir.instructions import Add, Free, Instruction, Launch, Run, Send, Update, Wait
from autopar.ir.lifetimes import with_frees
from autopar.ir.schedule import Buffer, Role, Schedule, Span, Versions
from autopar.passes.schedule.write_updates import gradients_of, without_gradients
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.weight_versions import WeightVersions


@dataclass(frozen=True)
class WriteVersions:
    """Write an UPDATE for every so many microbatches, and let each microbatch compute with the version of the weights that it takes.

    What follows on sums over the microbatches on the way to a gradient (collectives, casts) is written for each update, behind the last
    backward that has a part in it; what is made of parameters alone ahead of the first action, for each version.

    Reads: a `ScheduleProgram` that ranks can run. Writes: ADD and UPDATE of versions, `Schedule.versions`; gradients are no results then.
    Ensures: every rank that holds a parameter updates it as often as the others. Raises `PlanError` for a pipeline that has no such
    versions: a parameter that several stages hold, checks of the model's values, which are known too late.
    """

    versions: WeightVersions | None
    name: str = "write weight versions"

    def apply(self, program: ScheduleProgram) -> ScheduleProgram:
        asked = self.versions
        if asked is None or not any(map(gradients_of, program.places)):
            return program
        asked.require(program.order)
        _require(program)
        table, places = dict(program.buffers), list[Schedule]()
        for place, schedule in enumerate(program.places):
            (stage,) = program.stages_of(place)
            places.append(_Writer(schedule, gradients_of(schedule), stage, program.order, asked, table).written())
        return program.with_places(places, buffers=table)


def _require(program: ScheduleProgram) -> None:
    signature = program.places[0].signature
    if signature.outputs_of("check"):
        raise PlanError(
            "weight_versions: the model asserts something of its values, which a pipeline hears after its updates; leave one out"
        )
    held: dict[str, int] = {}
    for place, schedule in enumerate(program.places):
        for item in schedule.signature.outputs_of("gradient"):
            if held.setdefault(item.name, place) != place:
                raise PlanError(
                    f"weight_versions: stages {held[item.name]} and {place} both hold {item.name!r}, of which they would have different "
                    "versions at one time: untie it, or leave weight_versions out"
                )


@dataclass
class _Writer:
    """Writes one rank; new names go into `table`."""

    schedule: Schedule
    gradients: Mapping[str, str]
    stage: int
    order: PipelineSchedule
    asked: WeightVersions
    table: dict[str, Buffer]

    def written(self) -> Schedule:
        if not self.gradients:
            return self.schedule  # a stage without parameters
        instructions, every = self.schedule.instructions, self.asked.each(self.order)
        taken = self.asked.taken(self.stage, self.order)
        groups: list[list[Instruction]] = []
        for position, each in enumerate(instructions):
            if isinstance(each, Free) or position in self.copying:
                groups.append([])
            elif position in self.following:
                groups.append(self.following[position].rest)
            elif (microbatch := self.microbatches.get(position)) is not None:
                groups.append([self._of_microbatch(each, taken[microbatch], microbatch // every)])
            else:
                groups.append([each])
        before = {0: [*(Add(self._of_version(name, 0), name) for name in self.gradients), *self._copies(0)]}
        for update, position in enumerate(self._ends(every)):
            is_read = update + 1 in taken
            before[position] = [*self._update(update, is_read), *(self._copies(update + 1) if is_read else ())]
        schedule = without_gradients(_between(self.schedule, groups, before))
        schedule = schedule.regrouped(with_frees(schedule.instructions, {*schedule.inputs, *schedule.outputs}))
        return replace(schedule, versions=Versions(self.asked.num_updates(self.order), self.asked.staleness(self.stage, self.order)))

    # ---- what is written anew for each version, and for each update

    @cached_property
    def microbatches(self) -> dict[int, int]:
        """By the position of an instruction the microbatch that it is of. What it writes or adds says so; the span that it lies in may be
        that of another, since work is moved to overlap with communication."""
        found: dict[int, int] = {}
        for position, each in enumerate(self.schedule.instructions):
            names = (each.source,) if isinstance(each, Add) else each.writes
            for microbatch in (self.table[name].microbatch for name in names if name in self.table):
                if microbatch is not None:
                    found[position] = microbatch
        return found

    @cached_property
    def copying(self) -> dict[int, Instruction]:
        """By position what is made of updated parameters once a step: gathers, casts."""
        once = (
            (position, each)
            for position, each in enumerate(self.schedule.instructions)
            if all(name not in self.table or self.table[name].microbatch is None for name in each.writes)
        )
        return _descending(once, self.gradients)

    @cached_property
    def versioned(self) -> frozenset[str]:
        """The buffers of which there is one for each version."""
        return frozenset(self.gradients).union(*(each.writes for each in self.copying.values()))

    @cached_property
    def sums(self) -> frozenset[str]:
        """What the microbatches add up."""
        instructions = enumerate(self.schedule.instructions)
        return frozenset(each.target for position, each in instructions if isinstance(each, Add) and position in self.microbatches)

    @cached_property
    def following(self) -> dict[int, _Cut]:
        """By position what follows on sums over the microbatches on the way to a gradient."""
        after = _descending(enumerate(self.schedule.instructions), self.sums)
        needed, found, cuts = set(self.gradients.values()), dict[int, _Cut](), dict[str, _Cut]()
        for position, each in reversed(after.items()):
            if isinstance(each, (Run, Launch)) and not needed.isdisjoint(each.writes):
                cut = found[position] = _Cut.of(each, needed)
                needed.update(cut.own.reads)
                cuts |= {each.name: cut} if isinstance(each, Launch) else {}
        waits = {position: cuts[each.target] for position, each in after.items() if isinstance(each, Wait) and each.target in cuts}
        return dict(sorted((found | {position: cut.waited for position, cut in waits.items()}).items()))

    @cached_property
    def summed(self) -> frozenset[str]:
        """The buffers of which there is one for each update: sums over its microbatches, and what follows on them."""
        cuts = [cut.own for cut in self.following.values()]
        read = {name for each in cuts for name in each.reads} | set(self.gradients.values())
        return frozenset({name for each in cuts for name in each.writes} | (read & self.sums))

    def _ends(self, every: int) -> list[int]:
        """By update the position before which it is written: what the last backward with a part in it sends is on its way."""
        last: dict[int, int] = {}
        for span in self.schedule.spans:
            action = parse_action(span.action)
            if action.kind != "F":
                last[action.microbatch // every] = span.end
        instructions = self.schedule.instructions
        for position, microbatch in self.microbatches.items():
            each = instructions[position]
            if isinstance(each, Add) and each.target in self.summed:
                last[microbatch // every] = max(last[microbatch // every], position + 1)
        for update, position in last.items():
            while position < len(instructions) and isinstance(instructions[position], (Send, Free)):
                position += 1
            last[update] = position
        return [last[update] for update in range(self.asked.num_updates(self.order))]

    def _update(self, update: int, is_read: bool) -> list[Instruction]:
        tail = [_renamed(cut.own, lambda name: self._of_update(name, update)) for cut in self.following.values()]
        gradients = tuple(self._of_update(name, update) for name in self.gradients.values())
        versions = tuple(self._of_version(name, update + 1) for name in self.gradients) if is_read else ()
        return [*tail, Update(tuple(self.gradients), gradients, versions)]

    def _copies(self, version: int) -> list[Instruction]:
        return [_renamed(each, lambda name: self._of_version(name, version)) for each in self.copying.values()]

    def _of_microbatch(self, each: Instruction, version: int, update: int) -> Instruction:
        if isinstance(each, Add):
            return Add(self._of_update(each.target, update), each.source)
        return _renamed(each, lambda name: self._of_version(name, version))

    # ---- names

    def _of_version(self, name: str, version: int) -> str:
        return self._named(name, f"v{version}", "parameter" if name in self.gradients else None) if name in self.versioned else name

    def _of_update(self, name: str, update: int) -> str:
        return self._named(name, f"u{update}") if name in self.summed else name

    def _named(self, name: str, end: str, role: Role | None = None) -> str:
        buffer = self.table[name]
        self.table[f"{name}.{end}"] = buffer if role is None else buffer._replace(role=role)
        return f"{name}.{end}"


@dataclass(frozen=True)
class _Cut:
    """An instruction as far as gradients are made by it, and what else it does: a bucket may carry a loss, too."""

    own: Run | Launch | Wait
    rest: list[Instruction]

    @staticmethod
    def of(each: Run | Launch, needed: Collection[str]) -> _Cut:
        if isinstance(each, Run):
            return _Cut(each, [])
        pairs = list(zip(each.sources, each.targets, strict=True))
        own, rest = ([pair for pair in pairs if (pair[1] in needed) == is_own] for is_own in (True, False))
        return _Cut(_bucket(each, own), [_bucket(each, rest)] if rest else [])

    @property
    def waited(self) -> _Cut:
        """Of a collective its WAIT."""
        assert isinstance(self.own, Launch)
        return _Cut(Wait(self.own.name), [Wait(each.name) for each in self.rest if isinstance(each, Launch)])


def _bucket(launch: Launch, pairs: Sequence[tuple[str, str]]) -> Launch:
    return replace(launch, sources=tuple(source for source, _ in pairs), targets=tuple(target for _, target in pairs))


def _between(schedule: Schedule, groups: Sequence[Sequence[Instruction]], before: Mapping[int, Sequence[Instruction]]) -> Schedule:
    """With each instruction replaced by its group, and others before it that belong to no action."""
    instructions, begins, ends = list[Instruction](), list[int](), list[int]()
    for position in range(len(groups) + 1):
        ends.append(len(instructions))
        instructions += before.get(position, ())
        begins.append(len(instructions))
        instructions += groups[position] if position < len(groups) else ()
    spans = tuple(Span(each.action, begins[each.begin], ends[each.end]) for each in schedule.spans)
    return replace(schedule, instructions=tuple(instructions), spans=spans)


def _descending(instructions: Iterable[tuple[int, Instruction]], names: Iterable[str]) -> dict[int, Instruction]:
    """By position what computes from these buffers, or from what was computed from them, with WAITs."""
    made, found, flying = set(names), dict[int, Instruction](), set[str]()
    for position, each in instructions:
        if isinstance(each, (Run, Launch)) and not made.isdisjoint(each.reads):
            made.update(each.writes)
            found[position] = each
            flying |= {each.name} if isinstance(each, Launch) else set()
        elif isinstance(each, Wait) and each.target in flying:
            flying.discard(each.target)
            found[position] = each
    return found


def _renamed(each: Instruction, rename: Callable[[str], str]) -> Instruction:
    """With other names for what it computes with; transfers carry values of microbatches, and none of these."""
    if isinstance(each, Run):
        return Run(each.fragment, tuple(map(rename, each.inputs)), tuple(map(rename, each.outputs)))
    if isinstance(each, Launch):
        return replace(each, sources=tuple(map(rename, each.sources)), targets=tuple(map(rename, each.targets)))
    return Wait(rename(each.target)) if isinstance(each, Wait) else each
