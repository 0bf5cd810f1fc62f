"""The proof of pipelines: every planted fault is named with its rank, instruction and microbatch, and what passes does run."""

from __future__ import annotations

import random

import pytest

from autopar.errors import ScheduleError
from autopar.ir.actions import Edge, parse_schedule
from autopar.ir.instructions import Instruction, Send, Wait
from autopar.pipeline.check import check_pipeline, schedule_violations
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.expand import expand
from autopar.pipeline.marks import marked_grid
from autopar.pipeline.schedule_program import ScheduleProgram
from autopar.pipeline.schedules import GENERATORS, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_v
from tests.support.faults.pipelines import Machine, edited, with_row

PLAIN = expand(one_forward_one_backward(3, 4))
HALVED = expand(zb_h1(3, 4))
CHUNKED = expand(interleaved(2, 4, 2))
V = expand(zb_v(2, 3))
SKIP = expand(one_forward_one_backward(3, 4), (Edge(0, 1), Edge(1, 2), Edge(0, 2)))

# A program, a rank and an edit of its instructions; what the report must say, and where.
FAULTS: list[tuple[ScheduleProgram, int, str, str, str]] = [
    # An action dropped.
    (PLAIN, 1, "drop RUN 1F2", "1F2 never runs", "rank 1, at the end"),
    (PLAIN, 1, "drop RUN 1B0", "1B0 never runs", "rank 1, at the end"),
    (PLAIN, 2, "drop RUN 2B3", "buffer 2B3>1 is read before anything wrote it", "rank 2, instruction"),
    (HALVED, 0, "drop RUN 0W3", "0W3 never runs", "rank 0, at the end"),
    (HALVED, 1, "drop RUN 1I1", "1W1 runs too early", "rank 1, instruction"),
    (CHUNKED, 0, "drop RUN 2F1", "2B1 runs too early", "rank 0, instruction 26: RUN 2B1 ("),
    # An action twice.
    (PLAIN, 0, "twice RUN 0F1", "0F1 runs twice", "RUN 0F1 ("),
    (PLAIN, 2, "twice RUN 2B2", "2B2 runs twice", "RUN 2B2 ("),
    (HALVED, 2, "twice RUN 2W0", "2W0 runs twice", "RUN 2W0 ("),
    (HALVED, 1, "add RUN 1B2 after RUN 1W2", "1B2 does again what instruction", "RUN 1B2 ("),
    # Actions swapped.
    (PLAIN, 1, "swap RUN 1F1 | RUN 1B1", "1B1 runs too early", "RUN 1B1 ("),
    (HALVED, 0, "swap RUN 0I1 | RUN 0W1", "0W1 runs too early", "RUN 0W1 ("),
    (PLAIN, 2, "swap RUN 2F0 | RUN 2B0", "2B0 runs too early", "RUN 2B0 ("),
    (V, 0, "swap RUN 0F0 | RUN 3F0", "buffer 2F0>3 is read before anything wrote it", "rank 0, instruction 0: RUN 3F0 ("),
    (V, 1, "swap RUN 1F0 | RUN 2F0", "buffer 1F0>2 is read before anything wrote it", "RUN 2F0 ("),
    (V, 1, "swap RUN 1I1 | RUN 2I1", "buffer 2B1>1 is read before anything wrote it", "RUN 1I1 ("),
    # An action of another microbatch, stage or rank.
    (PLAIN, 1, "replace RUN 1F2 | RUN 1F1", "1F1 runs twice", "RUN 1F1 ("),
    (PLAIN, 1, "replace RUN 1F3 | RUN 1F4", "1F4 has no place at pp = 1", "RUN 1F4 ("),
    (PLAIN, 0, "replace RUN 0F1 | RUN 1F1", "1F1 has no place at pp = 0", "rank 0, instruction 2: RUN 1F1 ("),
    (HALVED, 2, "replace RUN 2W1 | RUN 2W0", "2W0 runs twice", "RUN 2W0 ("),
    # A send dropped, repeated, too early, of another microbatch, to the wrong peer.
    (PLAIN, 0, "drop SEND 0F2>1 pp=1", "what 0F2 makes for stage 1 is never sent", "RUN 0F2 ("),
    (PLAIN, 1, "drop SEND 1B3>0 pp=0", "what 1B3 makes for stage 0 is never sent", "RUN 1B3 ("),
    (PLAIN, 0, "twice SEND 0F2>1 pp=1", "transfer 0F2>1 is launched twice", "SEND 0F2>1 pp=1 ("),
    (PLAIN, 0, "move SEND 0F1>1 pp=1 before RUN 0F1", "buffer 0F1>1 is read before anything wrote it", "SEND 0F1>1 pp=1 ("),
    (PLAIN, 0, "replace SEND 0F1>1 pp=1 | SEND 0F2>1 pp=1", "buffer 0F2>1 is read before anything wrote it", "SEND 0F2>1 pp=1 ("),
    (PLAIN, 0, "replace SEND 0F1>1 pp=1 | SEND 0F1>1 pp=2", "wrong peer: stage 1 is not there", "SEND 0F1>1 pp=2 ("),
    (PLAIN, 1, "replace SEND 1B2>0 pp=0 | SEND 1B2>0 pp=2", "wrong peer: stage 0 is not there", "SEND 1B2>0 pp=2 ("),
    (PLAIN, 0, "replace SEND 0F1>1 pp=1 | SEND 0F1>2 pp=2", "0F1>2 is nothing that this pipeline has", "SEND 0F1>2 pp="),
    (PLAIN, 0, "replace SEND 0F3>1 pp=1 | SEND 0F7>1 pp=1", "0F7>1 is nothing that this pipeline has", "SEND 0F7>1 pp="),
    # A receive dropped, repeated, of another microbatch, from the wrong peer, never read.
    (PLAIN, 1, "drop RECV 0F2>1 pp=0", "buffer 0F2>1 is read before anything wrote it", "RUN 1F2 ("),
    (PLAIN, 0, "drop RECV 1B3>0 pp=1", "buffer 1B3>0 is read before anything wrote it", "RUN 0B3 ("),
    (PLAIN, 1, "twice RECV 0F1>1 pp=0", "transfer 0F1>1 is launched twice", "RECV 0F1>1 pp=0 ("),
    (PLAIN, 1, "replace RECV 0F2>1 pp=0 | RECV 0F3>1 pp=0", "are different transfers", "RECV 0F3>1 pp=0 ("),
    (PLAIN, 1, "replace RECV 0F2>1 pp=0 | RECV 0F2>1 pp=2", "wrong peer: stage 0 is not there", "RECV 0F2>1 pp=2 ("),
    (PLAIN, 0, "add RECV 0F0>1 pp=0 before RUN 0F1", "stage 1 is not at pp = 0", "rank 0, instruction"),
    (CHUNKED, 1, "drop RUN 3F3", "2F3>3 is never read", "RECV 2F3>3 pp=0 ("),
    # Waits.
    (PLAIN, 1, "drop WAIT 0F1>1", "buffer 0F1>1 is read before its receive is complete", "RUN 1F1 ("),
    (PLAIN, 1, "move WAIT 0F1>1 after RUN 1F1", "buffer 0F1>1 is read before its receive is complete", "RUN 1F1 ("),
    (PLAIN, 0, "drop WAIT 0F1>1", "the send 0F1>1 is never waited for", "rank 0, at the end"),
    (PLAIN, 0, "twice WAIT 0F1>1", "WAIT without a LAUNCH for 0F1>1", "WAIT 0F1>1"),
    (PLAIN, 0, "move WAIT 0F1>1 before SEND 0F1>1 pp=1", "WAIT without a LAUNCH for 0F1>1", "WAIT 0F1>1"),
    # Pairs in another order than the peer's.
    (PLAIN, 0, "swap SEND 0F0>1 pp=1 | SEND 0F1>1 pp=1", "number 1 from rank 0 to rank 1 are different transfers", "RECV 0F0>1 pp=0 ("),
    (PLAIN, 1, "swap RECV 0F2>1 pp=0 | RECV 0F3>1 pp=0", "number 3 from rank 0 to rank 1 are different transfers", "RECV 0F3>1 pp=0 ("),
    (CHUNKED, 1, "swap RECV 0F2>1 pp=0 | RECV 2F1>3 pp=0", "from rank 0 to rank 1 are different transfers", "rank 1, instruction"),
    (SKIP, 2, "swap RECV 0F1>2 pp=0 | RECV 0F2>2 pp=0", "from rank 0 to rank 2 are different transfers", "RECV 0F2>2 pp=0 ("),
    # Gradients.
    (PLAIN, 0, "drop RUN 0REDUCE_GRAD", "the gradients of stage 0 are never reduced", "rank 0, at the end"),
    (PLAIN, 2, "twice RUN 2REDUCE_GRAD", "the gradients of stage 2 are reduced twice", "2REDUCE_GRAD"),
    (HALVED, 1, "move RUN 1REDUCE_GRAD before RUN 1W3", "gradients of stage 1 are reduced before they are complete", "1REDUCE_GRAD"),
    (PLAIN, 1, "replace RUN 1REDUCE_GRAD | RUN 0REDUCE_GRAD", "stage 0 is not at pp = 1", "0REDUCE_GRAD"),
]


def test_forty_faults_and_more_are_planted() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.parametrize(("program", "rank", "edit", "what", "where"), FAULTS, ids=[f"{case[0].order.name} {case[2]}" for case in FAULTS])
def test_names_the_fault_and_its_place(program: ScheduleProgram, rank: int, edit: str, what: str, where: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_pipeline(edited(program, rank, edit))
    named = [each for each in str(caught.value).split("\n") if what in each]
    assert named, caught.value
    assert any(where in each for each in named), named
    assert "ERROR" in caught.value.__notes__[0] and "^" in caught.value.__notes__[0]


def blocking(program: ScheduleProgram) -> ScheduleProgram:
    """Every send is waited for at once."""
    for rank, schedule in enumerate(program.places):
        sends = {each.transfer for each in schedule.instructions if isinstance(each, Send)}
        waiting: list[Instruction] = []
        for each in schedule.instructions:
            if not (isinstance(each, Wait) and each.target in sends):
                waiting += [each, Wait(each.transfer)] if isinstance(each, Send) else [each]
        program = with_row(program, rank, waiting)
    return program


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_names_a_cycle_that_only_rendezvous_shows(name: str, num_ranks: int) -> None:
    """Blocking sends and receives launched when needed: buffered sends would run it, rendezvous does not."""
    program = blocking(expand(GENERATORS[name](num_ranks, 5), prefetch=0))
    assert Machine(program, is_eager=True).run() and not Machine(program).run()
    (fault,) = schedule_violations(program)
    assert fault.what == "deadlock: nobody can advance"
    assert "no cycle of waits, and not rank" in fault.expected and "→" in fault.expected
    assert all(f"rank {rank}, instruction {number}: WAIT " in fault.got for rank, number in fault.instructions)
    assert "waits for rank" in fault.got


def test_all_faults_are_reported_together_and_marked() -> None:
    text = str(one_forward_one_backward(3, 4)).replace("1F1", "1F2").replace("0B2 - ", "")
    with pytest.raises(ScheduleError, match="1F2 runs twice") as caught:
        check_pipeline(parse_schedule(text))
    assert "0B2 never runs" in str(caught.value) and "1F1 never runs" in str(caught.value)
    assert caught.value.__notes__[0].count("^") >= 9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0B0 -   0F3", "0F3 0B0 -", None),  # Another order, as good.
        ("1F1 1B0 -", "1B0 - 1F1", None),
        ("0F0 0F1", "0F1", "0F0 never runs"),
        ("2F1 2B1 -", "2B1 - 2F1", "2B1 runs too early"),
        ("1F2", "1F2 1F2", "1F2 runs twice"),
        ("ranks 0 1 2", "ranks 0 2 1", "has no place at pp = "),
        ("ranks 0 1 2", "ranks 0 1 2 2", "3F0 never runs"),
        ("4 microbatches", "5 microbatches", "0F4 never runs"),
        ("4 microbatches", "3 microbatches", "0F3 has no place at pp = 0"),
    ],
)
def test_checks_grids_edited_by_hand(old: str, new: str, message: str | None) -> None:
    text = str(one_forward_one_backward(3, 4)).replace(" .  ", "")
    for _ in range(4):
        text = text.replace("  ", " ")
    old = " ".join(old.split())
    assert old in text
    edited_schedule = parse_schedule(text.replace(old, new))
    if message is None:
        check_pipeline(edited_schedule)
        return
    with pytest.raises(ScheduleError, match=message):
        check_pipeline(edited_schedule)


def mutated(program: ScheduleProgram, draw: random.Random) -> ScheduleProgram:
    """One to three random edits of instructions."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        rank = draw.randrange(len(program.places))
        row = list(program.places[rank].instructions)
        one, other = draw.randrange(len(row)), draw.randrange(len(row))
        verb = draw.choice(("swap", "near", "near", "drop", "twice", "move"))
        if verb == "near":
            one = min(one, len(row) - 2)
            other = one + 1
        if verb in ("swap", "near"):
            row[one], row[other] = row[other], row[one]
        elif verb == "drop":
            row.pop(one)
        elif verb == "twice":
            row.insert(other, row[one])
        else:
            row.insert(other, row.pop(one))
        program = with_row(program, rank, row)
    return program


@pytest.mark.parametrize("program", [PLAIN, HALVED, CHUNKED, V, SKIP, expand(gpipe(2, 3))], ids=lambda program: program.order.name)
def test_what_passes_runs_and_what_does_not_run_is_refused(program: ScheduleProgram) -> None:
    """Random edits, judged by a machine that knows nothing of the check."""
    assert Machine(program).run() and not schedule_violations(program)
    draw = random.Random(0)
    passed = refused = 0
    for _ in range(250):
        edit = mutated(program, draw)
        found = schedule_violations(edit)
        assert found or Machine(edit).run(), str(edit)
        passed, refused = passed + (not found), refused + bool(found)
    assert passed > 10 and refused > 100


def test_memory_over_budget_names_the_first_instruction_over() -> None:
    cost = PipelineCost.uniform(3, saved_bytes=10.0)
    check_pipeline(one_forward_one_backward(3, 4), cost, (30.0, 20.0, 10.0))
    with pytest.raises(ScheduleError) as caught:
        check_pipeline(one_forward_one_backward(3, 4), cost, (30.0, 15.0, 10.0))
    text = str(caught.value)
    assert "rank 1, instruction 7: RUN 1F1 (0F1>1) -> (1F1>2, 1F1.I, 1F1.W): memory over budget" in text
    assert "at most 15 bytes" in text and "20 bytes, 2 live microbatches" in text


def test_what_follows_from_a_fault_at_the_same_instruction_is_not_told_as_well() -> None:
    """An action that runs twice also writes its buffers twice, and is read by nobody."""
    found = schedule_violations(edited(PLAIN, 1, "twice RUN 1F2"))
    assert [each.what for each in found] == ["1F2 runs twice"]


def test_a_budget_needs_prices() -> None:
    with pytest.raises(ScheduleError, match="pass cost="):
        check_pipeline(one_forward_one_backward(2, 2), budget_bytes=1.0)


def test_returns_the_instructions_that_it_proved() -> None:
    schedule = zb_h1(3, 4)
    assert check_pipeline(schedule) == expand(schedule) == check_pipeline(expand(schedule))


def test_the_grid_marks_the_place() -> None:
    program = edited(PLAIN, 1, "drop WAIT 0F1>1")
    lines = marked_grid(program, schedule_violations(program)).splitlines()
    row, mark = lines[2], lines[3]
    assert row[mark.index("^") : mark.index("^") + 3] == "1F1" and "ERROR 1" in mark
