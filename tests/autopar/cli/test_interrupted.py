"""Ctrl-C gives the best that was found so far, and exit code 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# It says so on standard error when it has come to a place, and waits there.
WAITING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background has it ignored
import autopar.foresight.search as search
import autopar.doors.measure_work as door
from autopar.cli.main import main

def waits_at(module, name, number):
    real, seen = getattr(module, name), []
    def wrapped(*args, **kwargs):
        seen.append(1)
        if len(seen) == number:
            print("here", file=sys.stderr, flush=True)
            for _ in range(600):  # a signal that comes just before a sleep begins is seen only after it: many short ones
                time.sleep(0.1)
        return real(*args, **kwargs)
    setattr(module, name, wrapped)

places = {"mesh": (search.Search, "_on_mesh", 3), "second": (door, "_measured", 2), "first": (door, "_measured", 1)}
waits_at(*places[sys.argv[1]])
main(sys.argv[2:])
"""
PLAN = ["plan", "--model", "tests.autopar.cli.test_main:small", "--cluster", "8xh100:4", "--global-batch", "8", "--tp", "1", "2", "--json"]


def interrupted(place: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a plan that is stopped at a place."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING, place, *PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        assert child.stderr is not None
        said = ""
        while "here" not in said:
            line = child.stderr.readline()
            assert line, said
            said += line
        child.send_signal(signal.SIGINT)
        out, rest = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, out, rest


@pytest.mark.parametrize("place", ["mesh", "second"])
def test_what_is_known_is_said(place: str) -> None:
    """In the search the meshes so far; while the model is read the plans of the sizes of tp that it has been read with."""
    code, out, error = interrupted(place)
    found = json.loads(out)
    assert code == 130 and not found["is_complete"] and found["plans"] and "Traceback" not in error
    sizes = {plan["mesh"]["tp"] for plan in found["plans"]}
    assert len(found["plans"]) == 2 if place == "mesh" else sizes == {1}


def test_before_anything_is_known_nothing_is_said() -> None:
    code, out, error = interrupted("first")
    assert (code, out) == (130, "") and error.strip() == "autopar: stopped before anything was found"
