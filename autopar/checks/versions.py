"""Invariants of weight versions: what computes with which version, and how old gradients are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.checks.buffers import place
from autopar.checks.violation import Violation
from autopar.ir.actions import parse_action
from autopar.ir.instructions import Add, Copy, Instruction, Launch, Run, Update, Wait
from autopar.ir.schedule import Schedule, Versions


class Version(NamedTuple):
    """The buffer of a parameter, and how many updates it has had."""

    parameter: str
    number: int


def check_versions(rank: int, schedule: Schedule) -> list[Violation]:
    """Every violation that shows on `rank` alone, where a step updates more than once.

    Each parameter that is updated is so as often as `schedule.versions` says. The forward and backward of a microbatch compute with one
    version of it. Each microbatch has a part in one UPDATE of it, and no more updates than said lie between the version that it computed
    with and the one that it updates.
    """
    return list(_Walk(rank, schedule).violations()) if schedule.versions != Versions() else []


def staleness_of(schedule: Schedule) -> int:
    """How many updates lie at most between the version that a gradient is computed at and the one that it updates, by the instructions."""
    walk = _Walk(0, schedule)
    return max((each.age for each in walk.uses()), default=0)


class _Use(NamedTuple):
    """A microbatch has a part in the UPDATE of a parameter."""

    position: int
    parameter: str
    microbatch: int
    age: int


@dataclass
class _Walk:
    rank: int
    schedule: Schedule
    # By buffer the versions that it is or is made of, outside of actions; by buffer the microbatches that have a part in it.
    versions: dict[str, frozenset[Version]] = field(default_factory=dict[str, frozenset[Version]])
    parts: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    flying: dict[str, Launch | Copy] = field(default_factory=dict[str, Launch | Copy])
    # By parameter and microbatch the versions that its actions read, and where the first does.
    read: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict[tuple[str, int], dict[int, int]])
    times: Counter[str] = field(default_factory=Counter[str])

    def uses(self) -> Iterator[_Use]:
        inside = {number: parse_action(each.action) for each in self.schedule.spans for number in range(each.begin, each.end)}
        items = zip(self.schedule.signature.inputs, self.schedule.inputs, strict=True)
        self.versions |= {name: frozenset([Version(name, 0)]) for item, name in items if item.kind == "parameter"}
        for position, each in enumerate(self.schedule.instructions):
            if isinstance(each, Update):
                for parameter, gradient in zip(each.parameters, each.gradients, strict=False):
                    for microbatch in sorted(self.parts.get(gradient, ())):
                        taken = min(self.read.get((parameter, microbatch), {self.times[parameter]: 0}))
                        yield _Use(position, parameter, microbatch, self.times[parameter] - taken)
                    self.times[parameter] += 1
                for parameter, name in zip(each.parameters, each.versions, strict=False):
                    self.versions[name] = frozenset([Version(parameter, self.times[parameter])])
            else:
                self._follow(position, each, inside[position].microbatch if position in inside else None)

    def _follow(self, position: int, each: Instruction, microbatch: int | None) -> None:
        if isinstance(each, Wait) and each.target in self.flying:
            launch = self.flying.pop(each.target)
            self._make(launch.sources, launch.targets, microbatch)
        elif isinstance(each, (Launch, Copy)):
            self.flying[each.name] = each
        elif isinstance(each, Add):
            number = self.schedule.buffers[each.source].microbatch if each.source in self.schedule.buffers else None
            self.parts[each.target] = self.parts.get(each.target, frozenset()) | (frozenset() if number is None else {number})
            self.versions.setdefault(each.target, self.versions.get(each.source, frozenset()))
        elif isinstance(each, Run):
            self._make(each.inputs, each.outputs, microbatch)
        if microbatch is not None and isinstance(each, (Run, Launch)):
            for version in (one for name in each.reads for one in self.versions.get(name, ())):
                self.read.setdefault((version.parameter, microbatch), {}).setdefault(version.number, position)

    def _make(self, sources: tuple[str, ...], targets: tuple[str, ...], microbatch: int | None) -> None:
        parts = frozenset[int]().union(*(self.parts.get(name, frozenset()) for name in sources))
        made = frozenset[Version]().union(*(self.versions.get(name, frozenset()) for name in sources)) if microbatch is None else None
        for name in targets:
            self.parts[name] = parts
            if made:
                self.versions[name] = made

    def violations(self) -> Iterator[Violation]:
        promised, seen = self.schedule.versions, Counter[tuple[str, int]]()
        for use in self.uses():
            where = place(self.rank, use.position, self.schedule.instructions[use.position])
            seen[use.parameter, use.microbatch] += 1
            if use.age > promised.staleness:
                what = f"the gradient of {use.parameter} by microbatch {use.microbatch} is {use.age} updates old"
                yield self._violation(use.position, what, where, f"at most {promised.staleness}", str(use.age), "update it later")
            if seen[use.parameter, use.microbatch] == 2:
                what = f"microbatch {use.microbatch} has a part in two updates of {use.parameter}"
                yield self._violation(use.position, what, where, "one", "two", "a sum of its own for each update")
        for parameter, number in sorted(self.times.items()):
            if number < promised.num_updates:
                yield Violation(
                    f"parameter {parameter} is updated {number} times", f"rank {self.rank}", str(promised.num_updates), str(number)
                )
        for (parameter, microbatch), versions in self.read.items():
            if parameter in self.times and len(versions) > 1:
                (first, _), (second, position) = list(versions.items())[:2]
                what = f"microbatch {microbatch} computes with two versions of {parameter}"
                where = place(self.rank, position, self.schedule.instructions[position])
                yield self._violation(position, what, where, f"version {first}", f"version {second}", "keep the version of its forward")

    def _violation(self, position: int, what: str, where: str, expected: str, got: str, fix: str) -> Violation:
        return Violation(what, where, expected, got, fix, instructions=((self.rank, position),))
