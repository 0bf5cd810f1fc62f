import pytest
import torch
from torch.fx import symbolic_trace

from autopar.errors import ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Signature
from autopar.ir.schedule import Add, Fragment, Free, Launch, Pause, Receive, Run, Schedule, Send, Wait, parse

MESH = Mesh((("dp", 2), ("pp", 3), ("tp", 2)))
EVERY_KIND = (
    Run("f3", ("h_1@2", "w"), ("h_2@2", "mask@2")),
    Run("f0", (), ("x",)),
    Launch("all_reduce", "sum", ("dp", "tp.1"), "h_2@2", "h_3@2"),
    Wait("h_3@2"),
    Send("0F2>1", "pp", 1, ("h_3@2", "mask@2")),
    Receive("1B2>0", "pp.0", 12, ("g@2",)),
    Wait("0F2>1"),
    Add("g_w", "g_w@2"),
    Free(("h_3@2", "mask@2")),
    Pause(),
)


def schedule(text: str, **shapes: tuple[tuple[int, ...], torch.dtype]) -> Schedule:
    return Schedule(parse(text), {}, (), (), Signature((), ()), shapes)


def test_every_instruction_reads_back_as_it_prints() -> None:
    text = "\n".join(map(str, EVERY_KIND))
    assert parse(text) == EVERY_KIND
    assert "SEND 0F2>1 pp=1 (h_3@2, mask@2)" in text and "RECV 1B2>0 pp.0=12 (g@2)" in text and "ADD g_w (g_w@2)" in text
    assert all(hash(each) == hash(other) for each, other in zip(parse(text), EVERY_KIND, strict=True))


@pytest.mark.parametrize(
    "line",
    ["SEND 0F2>1 (h)", "SEND 0F2>1 pp (h)", "RECV a b pp=0 (h)", "SEND t pp=-1 (h)", "ADD g", "ADD g (a, b)", "WAIT a b", "COPY a", ""],
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


def test_microbatches_of_a_buffer_share_its_shape_unless_they_have_their_own() -> None:
    shapes = {"h": ((4, 2), torch.float32), "h@3": ((1, 2), torch.float32)}
    found = schedule("PAUSE", **shapes)
    assert [found.shape_of(name) for name in ("h", "h@0", "h@3", "g@0")] == [shapes["h"], shapes["h"], shapes["h@3"], None]


def test_the_fingerprint_tells_peers_and_transfers_apart() -> None:
    texts = ["SEND a pp=1 (x)", "SEND a pp=2 (x)", "SEND b pp=1 (x)", "SEND a pp=1 (y)", "RECV a pp=1 (x)", "ADD a (x)"]
    fragments = {"f": Fragment("f", symbolic_trace(lambda x: (x,)))}
    prints = {Schedule(parse(text), fragments, (), (), Signature((), ())).fingerprint for text in texts}
    assert len(prints) == len(texts)
