"""The proof of pipelines: every planted fault is named with its rank, instruction and microbatch, and what passes does run."""

from __future__ import annotations

import random

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.actions import Edge, parse_schedule
from autopar.pipeline.check import check_pipeline, check_program, marked_grid
from autopar.pipeline.cost import PipelineCost
from autopar.pipeline.expand import expand
from autopar.pipeline.program import PipelineInstruction, PipelineProgram, Send, Wait
from autopar.pipeline.schedules import GENERATORS, gpipe, interleaved, one_forward_one_backward, zb_h1, zb_v
from tests.support.faults.pipelines import Machine, edited, with_row

PLAIN = expand(one_forward_one_backward(3, 4))
HALVED = expand(zb_h1(3, 4))
CHUNKED = expand(interleaved(2, 4, 2))
V = expand(zb_v(2, 3))
SKIP = expand(one_forward_one_backward(3, 4), (Edge(0, 1), Edge(1, 2), Edge(0, 2)))

# A program, a rank and an edit of its instructions; what the report must say, and where.
FAULTS: list[tuple[PipelineProgram, int, str, str, str]] = [
    # An action dropped.
    (PLAIN, 1, "drop 1F2", "1F2 never runs", "rank 1, at the end"),
    (PLAIN, 1, "drop 1B0", "1B0 never runs", "rank 1, at the end"),
    (PLAIN, 2, "drop 2B3", "2SEND_B3>1@1 is launched before its value is made", "rank 2, instruction"),
    (HALVED, 0, "drop 0W3", "0W3 never runs", "rank 0, at the end"),
    (HALVED, 1, "drop 1I1", "1W1 runs too early", "rank 1, instruction"),
    (CHUNKED, 0, "drop 2F1", "2B1 runs too early", "rank 0, instruction 26: 2B1 (microbatch 1)"),
    # An action twice.
    (PLAIN, 0, "twice 0F1", "0F1 runs twice", "0F1 (microbatch 1)"),
    (PLAIN, 2, "twice 2B2", "2B2 runs twice", "2B2 (microbatch 2)"),
    (HALVED, 2, "twice 2W0", "2W0 runs twice", "2W0 (microbatch 0)"),
    (HALVED, 1, "add 1B2 after 1W2", "1B2 does again what instruction", "1B2 (microbatch 2)"),
    # Actions swapped.
    (PLAIN, 1, "swap 1F1 | 1B1", "1B1 runs too early", "1B1 (microbatch 1)"),
    (HALVED, 0, "swap 0I1 | 0W1", "0W1 runs too early", "0W1 (microbatch 1)"),
    (PLAIN, 2, "swap 2F0 | 2B0", "2B0 runs too early", "2B0 (microbatch 0)"),
    (V, 0, "swap 0F0 | 3F0", "3F0 reads what was not received", "rank 0, instruction 0: 3F0 (microbatch 0)"),
    (V, 1, "swap 1F0 | 2F0", "2F0 runs before what gives its input", "2F0 (microbatch 0)"),
    (V, 1, "swap 1I1 | 2I1", "1I1 runs before what gives its input", "1I1 (microbatch 1)"),
    # An action of another microbatch, stage or rank.
    (PLAIN, 1, "replace 1F2 | 1F1", "1F1 runs twice", "1F1 (microbatch 1)"),
    (PLAIN, 1, "replace 1F3 | 1F4", "1F4 has no place on this rank", "1F4 (microbatch 4)"),
    (PLAIN, 0, "replace 0F1 | 1F1", "1F1 has no place on this rank", "rank 0, instruction 2: 1F1 (microbatch 1)"),
    (HALVED, 2, "replace 2W1 | 2W0", "2W0 runs twice", "2W0 (microbatch 0)"),
    # A send dropped, repeated, too early, of another microbatch, to the wrong peer.
    (PLAIN, 0, "drop 0SEND_F2>1@1", "what 0F2 makes for stage 1 is never sent", "0F2 (microbatch 2)"),
    (PLAIN, 1, "drop 1SEND_B3>0@0", "what 1B3 makes for stage 0 is never sent", "1B3 (microbatch 3)"),
    (PLAIN, 0, "twice 0SEND_F2>1@1", "0SEND_F2>1@1 is launched twice", "0SEND_F2>1@1 (microbatch 2)"),
    (PLAIN, 0, "move 0SEND_F1>1@1 before 0F1", "0SEND_F1>1@1 is launched before its value is made", "0SEND_F1>1@1 (microbatch 1)"),
    (PLAIN, 0, "replace 0SEND_F1>1@1 | 0SEND_F2>1@1", "0SEND_F2>1@1 is launched before its value is made", "(microbatch 2)"),
    (PLAIN, 0, "replace 0SEND_F1>1@1 | 0SEND_F1>1@2", "wrong peer: stage 1 is not there", "0SEND_F1>1@2 (microbatch 1)"),
    (PLAIN, 1, "replace 1SEND_B2>0@0 | 1SEND_B2>0@2", "wrong peer: stage 0 is not there", "1SEND_B2>0@2 (microbatch 2)"),
    (PLAIN, 0, "replace 0SEND_F1>1@1 | 0SEND_F1>2@2", "0SEND_F1>2@2 carries nothing that this pipeline has", "(microbatch 1)"),
    (PLAIN, 0, "replace 0SEND_F3>1@1 | 0SEND_F7>1@1", "0SEND_F7>1@1 carries nothing that this pipeline has", "(microbatch 7)"),
    # A receive dropped, repeated, of another microbatch, from the wrong peer, never read.
    (PLAIN, 1, "drop 1RECV_F2<0@0", "1F2 reads what was not received", "1F2 (microbatch 2)"),
    (PLAIN, 0, "drop 0RECV_B3<1@1", "0B3 reads what was not received", "0B3 (microbatch 3)"),
    (PLAIN, 1, "twice 1RECV_F1<0@0", "1RECV_F1<0@0 is launched twice", "1RECV_F1<0@0 (microbatch 1)"),
    (PLAIN, 1, "replace 1RECV_F2<0@0 | 1RECV_F3<0@0", "carry different values", "1RECV_F3<0@0 (microbatch 3)"),
    (PLAIN, 1, "replace 1RECV_F2<0@0 | 1RECV_F2<0@2", "wrong peer: stage 0 is not there", "1RECV_F2<0@2 (microbatch 2)"),
    (PLAIN, 0, "add 1RECV_F0<0@0 before 0F1", "stage 1 is not on this rank", "rank 0, instruction"),
    (CHUNKED, 1, "drop 3F3", "3RECV_F3<2@0 is never read", "3RECV_F3<2@0 (microbatch 3)"),
    # Waits.
    (PLAIN, 1, "drop WAIT 1RECV_F1<0@0", "1F1 reads a value that may be on its way still", "1F1 (microbatch 1)"),
    (PLAIN, 1, "move WAIT 1RECV_F1<0@0 after 1F1", "1F1 reads a value that may be on its way still", "1F1 (microbatch 1)"),
    (PLAIN, 0, "drop WAIT 0SEND_F1>1@1", "0SEND_F1>1@1 has no WAIT", "0SEND_F1>1@1 (microbatch 1)"),
    (PLAIN, 0, "twice WAIT 0SEND_F1>1@1", "a second WAIT for 0SEND_F1>1@1", "WAIT 0SEND_F1>1@1 (microbatch 1)"),
    (PLAIN, 0, "move WAIT 0SEND_F1>1@1 before 0SEND_F1>1@1", "a WAIT before the launch", "WAIT 0SEND_F1>1@1 (microbatch 1)"),
    # Pairs in another order than the peer's.
    (PLAIN, 0, "swap 0SEND_F0>1@1 | 0SEND_F1>1@1", "number 1 from rank 0 to rank 1 carry different values", "1RECV_F0<0@0 (microbatch 0)"),
    (PLAIN, 1, "swap 1RECV_F2<0@0 | 1RECV_F3<0@0", "number 3 from rank 0 to rank 1 carry different values", "1RECV_F3<0@0 (microbatch 3)"),
    (CHUNKED, 1, "swap 1RECV_F2<0@0 | 3RECV_F1<2@0", "from rank 0 to rank 1 carry different values", "rank 1, instruction"),
    (SKIP, 2, "swap 2RECV_F1<0@0 | 2RECV_F2<0@0", "from rank 0 to rank 2 carry different values", "2RECV_F2<0@0 (microbatch 2)"),
    # Gradients.
    (PLAIN, 0, "drop 0REDUCE_GRAD", "the gradients of stage 0 are never reduced", "rank 0, at the end"),
    (PLAIN, 2, "twice 2REDUCE_GRAD", "the gradients of stage 2 are reduced twice", "2REDUCE_GRAD"),
    (HALVED, 1, "move 1REDUCE_GRAD before 1W3", "gradients of stage 1 are reduced before they are complete", "1REDUCE_GRAD"),
    (PLAIN, 1, "replace 1REDUCE_GRAD | 0REDUCE_GRAD", "stage 0 is not on this rank", "0REDUCE_GRAD"),
]


def test_forty_faults_and_more_are_planted() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.parametrize(("program", "rank", "edit", "what", "where"), FAULTS, ids=[f"{case[0].name} {case[2]}" for case in FAULTS])
def test_names_the_fault_and_its_place(program: PipelineProgram, rank: int, edit: str, what: str, where: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check_pipeline(edited(program, rank, edit))
    named = [each for each in str(caught.value).split("\n") if what in each]
    assert named, caught.value
    assert any(where in each for each in named), named
    assert "ERROR" in caught.value.__notes__[0] and "^" in caught.value.__notes__[0]


def blocking(program: PipelineProgram) -> PipelineProgram:
    """Every send is waited for at once."""
    for rank, row in enumerate(program.ranks):
        kept = [each for each in row if not (isinstance(each, Wait) and isinstance(each.launched, Send))]
        waiting: list[PipelineInstruction] = []
        for each in kept:
            waiting += [each, Wait(each)] if isinstance(each, Send) else [each]
        program = with_row(program, rank, waiting)
    return program


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_names_a_cycle_that_only_rendezvous_shows(name: str, num_ranks: int) -> None:
    """Blocking sends and receives launched when needed: buffered sends would run it, rendezvous does not."""
    program = blocking(expand(GENERATORS[name](num_ranks, 5), prefetch=0))
    assert Machine(program, is_eager=True).run() and not Machine(program).run()
    (fault,) = check_program(program)
    assert fault.what == "deadlock: nobody can advance"
    assert "no cycle of waits, and not rank" in fault.expected and "→" in fault.expected
    assert all(f"rank {rank}, instruction" in fault.got for rank in {place.rank for place in fault.places})
    assert "(microbatch " in fault.got and "waits for rank" in fault.got


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
        ("ranks 0 1 2", "ranks 0 2 1", "has no place on this rank"),
        ("ranks 0 1 2", "ranks 0 1 2 2", "3F0 never runs"),
        ("4 microbatches", "5 microbatches", "0F4 never runs"),
        ("4 microbatches", "3 microbatches", "0F3 has no place on this rank"),
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


def mutated(program: PipelineProgram, draw: random.Random) -> PipelineProgram:
    """One to three random edits of instructions."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        rank = draw.randrange(len(program.ranks))
        row = list(program.ranks[rank])
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


@pytest.mark.parametrize("program", [PLAIN, HALVED, CHUNKED, V, SKIP, expand(gpipe(2, 3))], ids=lambda program: program.name)
def test_what_passes_runs_and_what_does_not_run_is_refused(program: PipelineProgram) -> None:
    """Random edits, judged by a machine that knows nothing of the check."""
    assert Machine(program).run() and not check_program(program)
    draw = random.Random(0)
    passed = refused = 0
    for _ in range(250):
        edit = mutated(program, draw)
        found = check_program(edit)
        assert found or Machine(edit).run(), str(edit)
        passed, refused = passed + (not found), refused + bool(found)
    assert passed > 10 and refused > 100


def test_memory_over_budget_names_the_first_instruction_over() -> None:
    cost = PipelineCost.uniform(3, saved_bytes=10.0)
    check_pipeline(one_forward_one_backward(3, 4), cost, (30.0, 20.0, 10.0))
    with pytest.raises(ScheduleError) as caught:
        check_pipeline(one_forward_one_backward(3, 4), cost, (30.0, 15.0, 10.0))
    text = str(caught.value)
    assert "rank 1, instruction 7: 1F1 (microbatch 1): memory over budget" in text
    assert "at most 15 bytes" in text and "20 bytes, 2 live microbatches" in text


def test_a_budget_needs_prices() -> None:
    with pytest.raises(ScheduleError, match="pass cost="):
        check_pipeline(one_forward_one_backward(2, 2), budget_bytes=1.0)


def test_returns_the_instructions_that_it_proved() -> None:
    schedule = zb_h1(3, 4)
    assert check_pipeline(schedule) == expand(schedule) == check_pipeline(expand(schedule))


def test_the_grid_marks_the_place() -> None:
    program = edited(PLAIN, 1, "drop WAIT 1RECV_F1<0@0")
    lines = marked_grid(program, check_program(program)).splitlines()
    row, mark = lines[2], lines[3]
    assert row[mark.index("^") : mark.index("^") + 3] == "1F1" and "ERROR 1" in mark
