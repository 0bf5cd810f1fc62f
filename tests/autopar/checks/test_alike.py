"""Ranks that are alike are proved once: what is found is what a proof of every rank finds."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from autopar.checks import rendezvous, schedule
from autopar.checks.alike import Alike
from autopar.checks.schedule import check_schedule
from autopar.checks.violation import Violation
from autopar.ir.instructions import parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Buffer, Schedule

LAYOUT = ((8, 4), torch.float32)
TYPES = {name: LAYOUT for name in ("x", "a", "b", "c", "d", "e")} | {"wide": ((2, 8, 4), torch.float32)}
SMALL = Mesh((("pp", 2), ("dp", 2), ("tp", 2)))
# Beside the transfers: collectives over an axis that is uniform, over one that is not, over both.
FIRST = """
LAUNCH all_reduce sum tp (x) -> a
SEND 0F0>1 pp=1 (x)
WAIT a
LAUNCH all_reduce sum dp,tp (a) -> b
LAUNCH all_reduce sum pp,dp (x) -> c
WAIT b
PAUSE
LAUNCH all_reduce max pp (b) -> d
WAIT c
RECV 1B0>0 pp=1 (e)
WAIT d
WAIT 0F0>1
WAIT 1B0>0
FREE a b c d e
"""
LAST = """
RECV 0F0>1 pp=0 (e)
WAIT 0F0>1
LAUNCH all_reduce sum pp,dp (x) -> c
LAUNCH all_gather copy dp (e) -> wide
PAUSE
WAIT wide
WAIT c
LAUNCH all_reduce max pp (e) -> d
SEND 1B0>0 pp=0 (x)
WAIT d
WAIT 1B0>0
FREE c d e wide
"""


def written(lines: Iterable[str], **types: Buffer) -> Schedule:
    buffers = {name: Buffer(name, layout) for name, layout in TYPES.items()} | types
    return Schedule(parse("\n".join(lines)), {}, ("x",), (), Signature((Input("batch", "0", *LAYOUT),), ()), buffers)


def placed(schedules: Sequence[Schedule], mesh: Mesh) -> dict[int, Schedule]:
    """The same schedule for all ranks at a place along `pp`."""
    return {rank: schedules[mesh.coordinates(rank)["pp"]] for rank in range(mesh.size)}


def every_rank(schedules: dict[int, Schedule]) -> dict[int, Schedule]:
    """No two ranks share theirs: nobody knows that they are alike."""
    return {rank: replace(each) for rank, each in schedules.items()}


def kinds(found: list[Violation]) -> set[str]:
    return {re.sub(r"\d+", "N", each.what) for each in found}


def test_axes_along_which_nothing_changes_and_nothing_is_sent_are_uniform() -> None:
    first, last = written(FIRST.split("\n")[1:-1]), written(LAST.split("\n")[1:-1])
    alike = Alike.of(placed((first, last), SMALL), SMALL)
    assert alike.uniform == {"dp", "tp"} and dict(alike.schedules) == {0: first, 4: last}
    assert alike.members(4, ("pp", "dp")) == (0, 4) and alike.members(4, ("dp", "tp")) == (4,)
    along_tp = {rank: (first, last)[SMALL.coordinates(rank)["tp"]] for rank in range(8)}
    assert Alike.of(along_tp, SMALL).uniform == {"dp"}, "pp is sent along"
    alone = written(["LAUNCH all_reduce sum tp (x) -> a", "WAIT a", "FREE a"])
    assert list(Alike.of(dict.fromkeys(range(8), alone), SMALL).schedules) == [0]


def test_a_sound_program_passes_either_way() -> None:
    schedules = placed((written(FIRST.split("\n")[1:-1]), written(LAST.split("\n")[1:-1])), SMALL)
    assert check_schedule(schedules, SMALL) == [] == check_schedule(every_rank(schedules), SMALL)


def mutated(draw: random.Random, rows: list[list[str]]) -> None:
    """One edit: lines moved, dropped or swapped, other axes, another kind, another peer."""
    row = draw.choice(rows)
    one = draw.randrange(len(row))
    verb = draw.choice(("move", "drop", "swap", "axes", "axes", "kind", "name"))
    if verb == "move":
        row.insert(draw.randrange(len(row)), row.pop(one))
    elif verb == "drop":
        row.pop(one)
    elif verb == "swap":
        other = draw.randrange(len(row))
        row[one], row[other] = row[other], row[one]
    elif verb == "axes":
        launches = [number for number, line in enumerate(row) if line.startswith("LAUNCH")]
        one = draw.choice(launches) if launches else one
        row[one] = re.sub(r"(LAUNCH \S+ \S+) \S+", rf"\1 {draw.choice(('pp', 'dp', 'tp', 'tp,dp', 'dp,tp', 'pp,dp', 'pp,tp'))}", row[one])
    elif verb == "kind":
        row[one] = row[one].replace("sum", "max")
    else:
        row[one] = row[one].replace("0F0>1", "1B0>0")


def test_planted_faults_are_found_by_classes_as_by_all_ranks() -> None:
    draw, refused, passed = random.Random(0), 0, 0
    seen = set[str]()
    for _ in range(400):
        rows = [FIRST.split("\n")[1:-1], LAST.split("\n")[1:-1]]
        for _ in range(draw.choice((1, 1, 2))):
            mutated(draw, rows)
        schedules = placed([written(row) for row in rows], SMALL)
        quick, full = check_schedule(schedules, SMALL), check_schedule(every_rank(schedules), SMALL)
        assert kinds(quick) == kinds(full), "\n---\n".join("\n".join(row) for row in rows)
        assert {(each.what, each.where) for each in quick} <= {(each.what, each.where) for each in full}
        seen |= kinds(quick)
        refused, passed = refused + bool(quick), passed + (not quick)
    assert refused > 100 and passed > 20
    assert {"deadlock: nobody can advance", "two ranks of a group launch different collectives", "nobody sends this"} <= seen


def test_groups_that_have_the_same_representatives_are_told_apart() -> None:
    """Along pp the ranks of either place would meet, but one launches for all of dp as well."""
    one, other = (written([f"LAUNCH all_reduce sum {axes} (x) -> a", "WAIT a", "FREE a"]) for axes in ("pp", "pp,dp"))
    schedules = placed((one, other), SMALL)
    assert (
        kinds(check_schedule(schedules, SMALL)) == kinds(check_schedule(every_rank(schedules), SMALL)) == {"deadlock: nobody can advance"}
    )


def test_shapes_are_those_of_the_whole_group() -> None:
    gathered = written(["LAUNCH all_gather copy dp (x) -> wide", "WAIT wide", "FREE wide"])
    assert check_schedule(dict.fromkeys(range(8), gathered), SMALL) == []
    large = Mesh((("pp", 2), ("dp", 4), ("tp", 1)))
    (violation,) = check_schedule(dict.fromkeys(range(8), gathered), large)
    assert violation.expected == "f32[4, 8, 4]"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The ranks that were walked, by what for."""
    found: dict[str, list[int]] = {"buffers": [], "track": []}
    buffers, track = schedule.check_buffers, rendezvous._track
    monkeypatch.setattr(schedule, "check_buffers", lambda rank, *rest: found["buffers"].append(rank) or buffers(rank, *rest))
    monkeypatch.setattr(rendezvous, "_track", lambda rank, alike: found["track"].append(rank) or track(rank, alike))
    return found


def row_of(place: int, num_places: int) -> list[str]:
    """A stage that passes on what it gets, summed over the replicas."""
    row = (
        [f"RECV {place - 1}>{place} pp={place - 1} (e)", f"WAIT {place - 1}>{place}"]
        if place
        else ["LAUNCH all_reduce sum tp (x) -> e", "WAIT e"]
    )
    row += ["LAUNCH all_reduce sum dp,tp (e) -> a", "WAIT a"]
    if place + 1 < num_places:
        row += [f"SEND {place}>{place + 1} pp={place + 1} (a)", f"WAIT {place}>{place + 1}"]
    return [*row, "LAUNCH all_reduce max pp,dp (a) -> b", "WAIT b", "PAUSE", "FREE a b e"]


def test_four_thousand_ranks_are_four_walks(walks: dict[str, list[int]]) -> None:
    mesh = Mesh((("pp", 4), ("dp", 128), ("tp", 8)))
    rows = [row_of(place, 4) for place in range(4)]
    schedules = placed([written(row) for row in rows], mesh)
    assert check_schedule(schedules, mesh) == []
    assert walks == {"buffers": [0, 1024, 2048, 3072], "track": [0, 1024, 2048, 3072]}
    rows[2].remove("RECV 1>2 pp=1 (e)")
    rows[2].insert(6, "RECV 1>2 pp=1 (e)")
    found = check_schedule(placed([written(row) for row in rows], mesh), mesh)
    assert any("rank 2048, instruction 0: WAIT 1>2" in str(each) for each in found), "messages name real ranks"
