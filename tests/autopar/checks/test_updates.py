"""Each misuse of UPDATE is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.checks.updates import check_holders, check_updates
from autopar.errors import ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule
from tests.autopar.cost.test_schedule_memory import LAYOUT, schedule_of
from tests.support.schedules import check_schedules, retyped

MESH = Mesh((("dp", 2),))
SOUND = "RUN copy (w) -> (g.part)\nLAUNCH all_reduce sum dp (g.part) -> g\nWAIT g\nUPDATE (w) by (g)\nFREE g.part g"


def schedule(text: str) -> Schedule:
    signature = Signature((Input("parameter", "fc.weight", *LAYOUT), Input("batch", "0", *LAYOUT)), ())
    found = replace(schedule_of(text), inputs=("w", "x"), signature=signature)
    return retyped(found, dict.fromkeys(found.buffers, LAYOUT))


def said(text: str) -> list[str]:
    return [each.what for each in check_updates(0, schedule(text))]


def test_a_sound_update_passes() -> None:
    check_schedules([schedule(SOUND)] * 2, MESH)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (SOUND.replace("(w) by (g)", "(w, x) by (g)"), "an UPDATE has one gradient for each parameter"),
        (SOUND.replace("(w) by (g)", "(x) by (g)"), "buffer x is updated, and is no parameter"),
        (SOUND.replace("(w) by (g)", "(w, w) by (g, g)"), "parameter w is updated twice"),
        (SOUND.replace("by (g)", "by (g.part)"), "parameter w is updated by g.part, a part of a sum"),
        (SOUND + "\nRUN copy (w) -> (y)\nFREE y", "parameter w is read after its UPDATE"),
        ("RUN view (w) -> (v)\n" + SOUND + "\nRUN copy (v) -> (y)\nFREE y v", "parameter w is read after its UPDATE"),
        ("LAUNCH all_gather copy dp (w) -> y\n" + SOUND + "\nWAIT y\nFREE y", "parameter w is read after its UPDATE"),
    ],
)
def test_misuses_are_named(text: str, what: str) -> None:
    assert what in said(text), said(text)


@pytest.mark.parametrize(
    ("given", "text"),
    [(((4, 8), torch.float64), "f64[4, 8]"), (((4, 8), torch.int64), "i64[4, 8]"), (((8, 4), torch.float16), "f16[8, 4]")],
)
def test_a_gradient_of_another_shape_or_wider_dtype_is_named(given: tuple[tuple[int, ...], torch.dtype], text: str) -> None:
    found = check_updates(0, retyped(schedule(SOUND), {"g": given}))
    assert [each.what for each in found] == ["gradient g does not fit parameter w"]
    assert (found[0].expected, found[0].got) == ("f32[4, 8]", text)
    assert not check_updates(0, retyped(schedule(SOUND), {"g": ((4, 8), torch.float16)}))


def test_a_gradient_must_be_there_when_it_is_used() -> None:
    late = SOUND.replace("WAIT g\nUPDATE (w) by (g)", "UPDATE (w) by (g)\nWAIT g")
    with pytest.raises(ScheduleError, match="buffer g is read before its collective is complete"):
        check_schedules([schedule(late)] * 2, MESH)


def test_every_rank_that_holds_a_parameter_updates_it() -> None:
    idle = SOUND.replace("UPDATE (w) by (g)\n", "")
    found = check_holders({0: schedule(SOUND), 1: schedule(idle)})
    assert [each.what for each in found] == ["parameter fc.weight is not updated on rank 1, which holds it as well"]
    assert check_holders({0: schedule(idle), 1: schedule(idle)}) == []
