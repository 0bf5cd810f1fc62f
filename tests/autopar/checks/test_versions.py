"""Each fault of a schedule with several versions of its weights is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.checks.versions import check_versions, staleness_of
from autopar.ir.program import Input, Signature
from autopar.ir.schedule import Schedule, Span, Versions
from tests.autopar.cost.test_schedule_memory import LAYOUT, schedule_of
from tests.support.schedules import retyped

SOUND = """
ADD w.v0 (w)
RUN forward (x, w.v0) -> (h@0)
RUN forward (x, w.v0) -> (h@1)
RUN backward (h@0, w.v0) -> (g@0)
ADD g.u0 (g@0)
UPDATE (w) by (g.u0) -> (w.v1)
RUN forward (x, w.v1) -> (h@2)
RUN backward (h@1, w.v0) -> (g@1)
ADD g.u1 (g@1)
UPDATE (w) by (g.u1)
RUN backward (h@2, w.v1) -> (g@2)
ADD g.u2 (g@2)
UPDATE (w) by (g.u2)
""".strip()
SPANS = {"0F0": (1, 2), "0F1": (2, 3), "0B0": (3, 5), "0F2": (6, 7), "0B1": (7, 9), "0B2": (10, 12)}


PROMISED = Versions(3, 1)


def schedule(text: str, promised: Versions = PROMISED) -> Schedule:
    signature = Signature((Input("parameter", "fc.weight", *LAYOUT), Input("batch", "0", *LAYOUT)), ())
    found = replace(schedule_of(text), inputs=("w", "x"), signature=signature, versions=promised)
    found = retyped(found, dict.fromkeys(found.buffers, LAYOUT))
    numbered = {name: each._replace(microbatch=int(name.split("@")[1]) if "@" in name else None) for name, each in found.buffers.items()}
    return replace(found, buffers=numbered, spans=tuple(Span(name, *at) for name, at in SPANS.items()))


def test_sound_versions_pass_and_their_age_is_that_of_the_instructions() -> None:
    assert not check_versions(0, schedule(SOUND)) and staleness_of(schedule(SOUND)) == 1


@pytest.mark.parametrize(
    ("old", "new", "promised", "what"),
    [
        ("backward (h@1, w.v0)", "backward (h@1, w.v1)", Versions(3, 1), "microbatch 1 computes with two versions of w"),
        ("w.v1) -> (h@2)", "w.v0) -> (h@2)", Versions(3, 1), "microbatch 2 computes with two versions of w"),
        ("", "", Versions(3, 0), "the gradient of w by microbatch 1 is 1 updates old"),
        ("", "", Versions(4, 1), "parameter w is updated 3 times"),
        ("ADD g.u2 (g@2)", "ADD g.u2 (g@1)", Versions(3, 2), "microbatch 1 has a part in two updates of w"),
    ],
)
def test_faults_are_named(old: str, new: str, promised: Versions, what: str) -> None:
    found = [each.what for each in check_versions(0, schedule(SOUND.replace(old, new) if old else SOUND, promised))]
    assert what in found, found
