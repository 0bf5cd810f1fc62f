from dataclasses import replace

import pytest
import torch
from torch.fx import symbolic_trace

from autopar.errors import ScheduleError
from autopar.ir.instructions import Add, Free, Launch, Pause, Receive, Run, Send, Update, Wait, parse
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Buffer, Fragment, Schedule, Span
from tests.support.schedules import buffers_of

MESH = Mesh((("dp", 2), ("pp", 3), ("tp", 2)))
EVERY_KIND = (
    Run("f3", ("h_1@2", "w"), ("h_2@2", "mask@2")),
    Run("f0", (), ("x",)),
    Launch("all_reduce", "sum", ("dp", "tp.1"), ("h_2@2",), ("h_3@2",)),
    Launch("all_reduce", "sum", ("dp",), ("g_w", "g_b"), ("w", "b")),
    Wait("h_3@2"),
    Send("0F2>1", "pp", 1, ("h_3@2", "mask@2")),
    Receive("1B2>0", "pp.0", 12, ("g@2",)),
    Wait("0F2>1"),
    Add("g_w", "g_w@2"),
    Update(("w",), ("g_w",)),
    Update(("w", "b"), ("g_w", "g_b")),
    Free(("h_3@2", "mask@2")),
    Pause(),
)


F32 = ((4, 2), torch.float32)


def schedule(text: str, **shapes: tuple[tuple[int, ...], torch.dtype]) -> Schedule:
    return Schedule(parse(text), {}, (), (), Signature((), ()), buffers_of(text, shapes))


def test_every_instruction_reads_back_as_it_prints() -> None:
    text = "\n".join(map(str, EVERY_KIND))
    assert parse(text) == EVERY_KIND
    assert (
        "SEND 0F2>1 pp=1 (h_3@2, mask@2)" in text
        and "RECV 1B2>0 pp.0=12 (g@2)" in text
        and "ADD g_w (g_w@2)" in text
        and "UPDATE (w, b) by (g_w, g_b)" in text
    )
    assert all(hash(each) == hash(other) for each, other in zip(parse(text), EVERY_KIND, strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "SEND 0F2>1 (h)",
        "SEND 0F2>1 pp (h)",
        "RECV a b pp=0 (h)",
        "SEND t pp=-1 (h)",
        "ADD g",
        "ADD g (a, b)",
        "WAIT a b",
        "COPY a",
        "UPDATE w by g",
        "UPDATE () by ()",
        "",
    ],
)
def test_a_line_that_is_no_instruction_is_named(line: str) -> None:
    with pytest.raises(ScheduleError, match="line 2 is no instruction"):
        parse(f"PAUSE\n{line}\nPAUSE")


def test_a_channel_is_the_directed_pair_of_ranks_that_differ_on_one_axis() -> None:
    rank = MESH.rank_at({"dp": 1, "pp": 1, "tp": 0})
    after = MESH.rank_at({"dp": 1, "pp": 2, "tp": 0})
    assert Send("t", "pp", 2, ()).channel(MESH, rank) == (rank, after)
    assert Receive("t", "pp", 2, ()).channel(MESH, rank) == (after, rank)
    both = schedule("SEND a pp=2 (x)\nWAIT a\nSEND b pp=2 (x)\nRECV c pp=2 (y)")
    assert both.channels(MESH, rank) == {(rank, after), (after, rank)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("SEND t cp=1 (x)", "unknown axis 'cp'; the mesh has dp=2 × pp=3 × tp=2"),
        ("RECV t pp=3 (x)", "no rank at pp=3; the coordinates on pp are 0 to 2"),
        ("RECV t pp=0 (x)", "rank 1 itself stands at pp=0"),
    ],
)
def test_a_peer_that_is_not_there_is_refused(line: str, expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule(line).channels(MESH, 1)
    assert str(caught.value).startswith(line) and expected in str(caught.value)


def test_what_a_buffer_is_stands_in_the_table_not_in_its_name() -> None:
    text = "RUN f (h@2, k) -> (g)"
    buffers = {"h@2": Buffer("h", F32, 2), "k": Buffer("h", F32, 3), "g": Buffer("g")}
    found = Schedule(parse(text), {}, (), (), Signature((), ()), buffers)
    assert [found.microbatch_of(name) for name in ("h@2", "k", "g", "unknown@7")] == [2, 3, 0, 0]
    assert [found.type_of(name) for name in ("h@2", "k", "g", "unknown")] == [F32, F32, None, None]


def test_spans_cover_what_stands_in_the_place_of_their_instructions() -> None:
    found = replace(schedule("RUN a () -> ()\nRUN b () -> ()\nPAUSE"), spans=(Span("0F0", 0, 1), Span("0B0", 1, 2)))
    run, free = found.instructions[0], parse("FREE x")[0]
    grown = found.regrouped([[run, free], [], [Pause()]])
    assert grown.spans == (Span("0F0", 0, 2), Span("0B0", 2, 2)) and grown.instructions == (run, free, Pause())
    assert grown.appended([free]).instructions == (run, free, Pause(), free)
    assert replace(grown, is_over_at_pause=True).appended([free]).instructions == (run, free, free, Pause())


def test_the_fingerprint_tells_peers_and_transfers_apart() -> None:
    texts = ["SEND a pp=1 (x)", "SEND a pp=2 (x)", "SEND b pp=1 (x)", "SEND a pp=1 (y)", "RECV a pp=1 (x)", "ADD a (x)"]
    fragments = {"f": Fragment("f", symbolic_trace(lambda x: (x,)))}
    prints = {Schedule(parse(text), fragments, (), (), Signature((), ())).fingerprint for text in texts}
    assert len(prints) == len(texts)


def test_what_nothing_reads_behind_its_collective_is_spent() -> None:
    text = """
    LAUNCH all_reduce sum dp (given) -> a
    RUN f (x) -> (p, q, r, s, t)
    LAUNCH all_reduce sum dp (p) -> b
    LAUNCH all_reduce sum dp (q) -> c
    LAUNCH all_reduce sum dp (r, s) -> (d, e)
    LAUNCH all_reduce sum dp (t) -> f
    WAIT b
    FREE p
    RUN f (q) -> (u)
    """
    found = replace(schedule(text), inputs=("given", "x"), outputs=("t",))
    assert {name: (launch.name, number) for name, (launch, number) in found.spent.items()} == {"p": ("b", 0), "r": ("d", 0), "s": ("d", 1)}
