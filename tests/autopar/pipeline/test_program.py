"""Instructions as text, and what they say about themselves."""

from __future__ import annotations

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.actions import Action, Edge
from autopar.pipeline.expand import expand
from autopar.pipeline.program import (
    Compute,
    Receive,
    ReduceGradients,
    Send,
    Transfer,
    Wait,
    parse_instruction,
    parse_program,
    receives_of,
    sends_of,
)
from autopar.pipeline.schedules import GENERATORS, gpipe, zb_h1


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_what_prints_parses_back(name: str) -> None:
    schedule = GENERATORS[name](3, 4)
    program = expand(schedule)
    assert parse_program(str(program), schedule) == program
    assert program.schedule == schedule


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("2F0", Compute(Action(2, "F", 0))),
        ("2SEND_F0>3@1", Send(Transfer(2, 3, "F", 0), 1)),
        ("2SEND_B10>1@0", Send(Transfer(2, 1, "B", 10), 0)),
        ("3RECV_F0<2@0", Receive(Transfer(2, 3, "F", 0), 0)),
        ("WAIT 3RECV_F0<2@0", Wait(Receive(Transfer(2, 3, "F", 0), 0))),
        ("1REDUCE_GRAD", ReduceGradients(1)),
    ],
)
def test_how_instructions_are_written(text: str, instruction: object) -> None:
    assert parse_instruction(text) == instruction and str(instruction) == text


def test_both_ends_of_a_transfer_name_one_channel_and_one_value() -> None:
    send, receive = parse_instruction("2SEND_F0>3@1"), parse_instruction("3RECV_F0<2@0")
    assert isinstance(send, Send) and isinstance(receive, Receive)
    assert send.transfer == receive.transfer
    assert send.channel(0) == receive.channel(1) == (0, 1)
    assert (send.stage, send.peer_stage, receive.stage, receive.peer_stage) == (2, 3, 3, 2)


def test_what_actions_give_and_take() -> None:
    edges = (Edge(0, 1), Edge(0, 2, has_gradient=False), Edge(1, 2))
    assert list(sends_of(Action(0, "F", 3), edges)) == [Transfer(0, 1, "F", 3), Transfer(0, 2, "F", 3)]
    assert list(sends_of(Action(2, "I", 3), edges)) == [Transfer(2, 1, "B", 3)]
    assert list(receives_of(Action(2, "F", 3), edges)) == [Transfer(0, 2, "F", 3), Transfer(1, 2, "F", 3)]
    assert list(receives_of(Action(0, "B", 3), edges)) == [Transfer(1, 0, "B", 3)]
    assert not [*sends_of(Action(1, "W", 3), edges), *receives_of(Action(1, "W", 3), edges)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0\n  0F0\n  0Q0", "line 3, '0Q0': '0Q0' is no action"),
        ("0F0", "line 1, '0F0': an instruction before the first line `rank N`"),
        ("rank 7", "line 1, 'rank 7'"),
        ("rank 0\nWAIT 0F0", "neither a send nor a receive"),
        ("rank 0\n0SEND_F0<1@1", "a send goes > to a stage, a receive comes < from one"),
    ],
)
def test_refuses_what_is_no_program(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_program(text, gpipe(2, 2))


def test_a_program_edited_by_hand_is_another() -> None:
    schedule = zb_h1(2, 2)
    text = str(expand(schedule)).replace("WAIT 0SEND_F0>1@1\n", "\n", 1)
    program = parse_program(text, schedule)
    assert len(program.ranks[0]) == len(expand(schedule).ranks[0]) - 1
