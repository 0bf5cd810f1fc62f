"""Whom everybody waits for, read from records written by hand: a schedule, and how far each rank came."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from pathlib import Path

import pytest

import autopar
from autopar.errors import AutoparError, PeerError
from autopar.ir.mesh import Mesh
from autopar.reports.flight_recorder import SILENT_SECONDS, FlightRecord, read_recorder
from autopar.reports.recorder_file import ALIVE_AT, CAPACITY, NUM_WORDS
from autopar.runtime.execute.recorder import FlightRecorder
from tests.support.schedules import schedule_of

TP_THEN_DP = """
RUN f (x) -> (a)
LAUNCH all_reduce sum tp (a) -> b
WAIT b
RUN g (b) -> (c)
LAUNCH all_reduce sum dp (c) -> d
WAIT d
"""
FIRST = "RUN f (x) -> (a)\nSEND h pp=1 (a)\nRECV g pp=1 (da)\nWAIT g\nRUN b (da) -> (dx)\nWAIT h"
SECOND = "RECV h pp=0 (a)\nWAIT h\nRUN f (a) -> (da)\nSEND g pp=0 (da)\nWAIT g"


def recorders(folder: Path, reached: Mapping[int, int], mesh: Mesh, *texts: str) -> dict[int, FlightRecorder]:
    """By rank one that began the instructions of its text up to the `reached` one; all are of this process."""
    found = {}
    for rank, number in reached.items():
        found[rank] = FlightRecorder(folder, rank, mesh.size, is_temporary=False)
        record = found[rank].call(schedule_of(texts[min(rank, len(texts) - 1)]), mesh, rank, tuple(range(mesh.size)))
        for each in range(number + 1):
            record(each)
    return found


def silence(folder: Path, rank: int, seconds: float) -> None:
    """As if the process had shown no life for some time; its recorder goes on in this one."""
    path = folder / f"rank{rank}.ring"
    words = array("q", path.read_bytes())
    words[ALIVE_AT] -= int(seconds * 1e9)
    (folder / f"rank{rank}.json").with_suffix(".ring").unlink()
    path.write_bytes(words.tobytes())


def read(folder: Path) -> FlightRecord:
    return read_recorder(str(folder))


def test_a_rank_that_did_not_launch_is_named_with_its_instruction(tmp_path: Path) -> None:
    recorders(tmp_path, {0: 2, 1: 0}, Mesh((("dp", 1), ("tp", 2))), TP_THEN_DP)
    found = read(tmp_path)
    assert found.awaited == (1,)
    assert str(found.instruction(1)) == "RUN f (x) -> (a)"
    assert "everybody waits for rank 1" in str(found)
    assert "at instruction 2 of call 1" in str(found) and "which rank 1 did not launch" in str(found)


def test_a_chain_of_waits_leads_to_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    """Rank 0 waits on tp for rank 1, which waits on dp for rank 3 of the step before; 2 waits for 3, too."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    at = recorders(tmp_path, {0: 5, 1: 5, 2: 5, 3: 3}, mesh, TP_THEN_DP)
    again = at[0].call(schedule_of(TP_THEN_DP), mesh, 0, (0, 1, 2, 3))
    for number in range(3):
        again(number)
    found = read(tmp_path)
    assert {rank: each.missing for rank, each in found.waiting.items()} == {0: (1,), 1: (3,)}
    assert found.awaited == (3,)
    assert str(found.instruction(3)) == "RUN g (b) -> (c)"


def test_transfers_are_matched_by_their_channel(tmp_path: Path) -> None:
    recorders(tmp_path, {0: 3, 1: 2}, Mesh((("pp", 2),)), FIRST, SECOND)
    found = read(tmp_path)
    assert found.awaited == (1,)
    assert found.waiting[0].missing == (1,)
    assert str(found.waiting[0].launched) == "RECV g pp=1 (da)"


def test_a_rank_between_calls_is_behind_one_that_waits_in_the_next(tmp_path: Path) -> None:
    mesh = Mesh((("dp", 1), ("tp", 2)))
    at = recorders(tmp_path, {0: 6, 1: 6}, mesh, TP_THEN_DP)
    again = at[0].call(schedule_of(TP_THEN_DP), mesh, 0, (0, 1))
    for number in range(3):
        again(number)
    found = read(tmp_path)
    assert found.awaited == (1,)
    assert found.instruction(1) is None
    assert "after call 1, which ended at" in str(found)


def test_a_rank_that_did_not_come_to_a_call_is_named(tmp_path: Path) -> None:
    """The ranks agree before a call, which is no instruction: a loader hangs, or the loop left a step out."""
    at = recorders(tmp_path, {0: 6, 1: 6, 2: 6}, Mesh((("dp", 3), ("tp", 1))), TP_THEN_DP)
    for rank in (0, 2):
        at[rank].failed(PeerError(f"rank {rank} got no answer from rank 1 for a comparison of the ranks' calls"))
    assert read(tmp_path).awaited == (1,)
    assert str(read(tmp_path)).startswith("everybody waits for rank 1\n  rank 1 ")


def test_a_rank_that_has_left_is_named(tmp_path: Path) -> None:
    at = recorders(tmp_path, {0: 6}, Mesh((("dp", 1), ("tp", 2))), TP_THEN_DP)
    at[0].failed(PeerError("rank 0 got no answer from rank 1 for a comparison of the ranks' calls"))
    assert str(read(tmp_path)).startswith("everybody waits for rank 1\nno record of rank 1: ended, or never ran")


def test_a_rank_without_a_sign_of_life_is_named_though_all_have_launched(tmp_path: Path) -> None:
    recorders(tmp_path, {0: 2, 1: 2}, Mesh((("dp", 1), ("tp", 2))), TP_THEN_DP)
    assert read(tmp_path).awaited == ()
    assert "nobody is behind the others" in str(read(tmp_path))
    silence(tmp_path, 1, SILENT_SECONDS + 1)
    found = read(tmp_path)
    assert found.silent == found.awaited == (1,)
    assert "no sign of life since" in str(found)


def test_the_rank_that_failed_by_itself_is_named_not_those_that_it_left(tmp_path: Path) -> None:
    at = recorders(tmp_path, {0: 2, 1: 0}, Mesh((("dp", 1), ("tp", 2))), TP_THEN_DP)
    error = ValueError("an index is out of range")
    at[1].failed(error)
    at[0].failed(PeerError("rank 0 got no answer from rank 1"))
    found = read(tmp_path)
    assert found.awaited == (1,)
    assert "raised ValueError: an index is out of range" in str(found)
    assert f"autopar.read_recorder({str(tmp_path)!r})" in error.__notes__[0]


def test_whoever_goes_on_after_an_error_has_failed_no_longer(tmp_path: Path) -> None:
    mesh = Mesh((("dp", 1), ("tp", 2)))
    at = recorders(tmp_path, {0: 2, 1: 0}, mesh, TP_THEN_DP)
    at[1].failed(ValueError("an index is out of range"))
    again = at[1].call(schedule_of(TP_THEN_DP), mesh, 0, (0, 1))
    again(0)
    assert "raised" not in str(read(tmp_path))


def test_ranks_without_a_record_are_named(tmp_path: Path) -> None:
    recorders(tmp_path, {0: 2}, Mesh((("dp", 1), ("tp", 2))), TP_THEN_DP)
    assert read(tmp_path).missing == (1,)
    assert "no record of rank 1" in str(read(tmp_path))


def test_the_latest_thousand_instructions_go_to_json_with_their_times(tmp_path: Path) -> None:
    mesh = Mesh((("tp", 1),))
    (at,) = recorders(tmp_path, {0: 5}, mesh, TP_THEN_DP).values()
    for _ in range(CAPACITY // 6 + 10):
        record = at.call(schedule_of(TP_THEN_DP), mesh, 0, (0,))
        for number in range(7):
            record(number)
    read(tmp_path).write(tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["ranks"][0]["instructions"]
    assert len(rows) == CAPACITY
    assert rows[-1]["what"] == "end of the call" and rows[-2]["what"] == "WAIT d"
    assert all(one["end_seconds"] == other["begin_seconds"] >= one["begin_seconds"] for one, other in zip(rows, rows[1:], strict=False))


def test_a_folder_without_records_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"no flight recorder has written to .*: there is no rank0.json"):
        autopar.read_recorder(tmp_path)
    recorders(tmp_path, {0: 2}, Mesh((("tp", 2),)), TP_THEN_DP)
    (tmp_path / "rank0.ring").write_bytes(bytes(8 * NUM_WORDS))
    with pytest.raises(AutoparError, match="is no ring of this version"):
        autopar.read_recorder(tmp_path)


BY_NODE = """
LAUNCH all_gather copy dp by 2 (a) -> b
RUN f (x) -> (c)
WAIT b
RUN g (b) -> (d)
"""


def test_of_a_collective_by_node_ranks_that_do_not_wait_yet_are_awaited(tmp_path: Path) -> None:
    """They launch its second half there."""
    recorders(tmp_path, {0: 2, 1: 2, 2: 1, 3: 3}, Mesh((("dp", 4),)), BY_NODE)
    found = read(tmp_path)
    assert found.awaited == (2,)
    assert str(found.instruction(2)) == "RUN f (x) -> (c)"
