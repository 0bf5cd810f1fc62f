"""The flags of the examples, and where a run with them lives."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
import torch
from options import Options, parse, parse_mesh
from place import Place, choose_backend, find_place
from torch.distributed.run import get_args_parser


def test_defaults_are_the_demo() -> None:
    options = parse("a model", [])
    assert options.mesh == {"dp": 2, "tp": 2} and options.backend == "inductor"
    assert options.dropout == 0.0 and not options.single


def test_mesh_keeps_the_order_of_its_axes() -> None:
    assert list(parse_mesh("tp=4,dp=2").items()) == [("tp", 4), ("dp", 2)]


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=two", "dp=2,dp=2", "cp=2", "", "dp=2,"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no mesh; write each of pp, dp, tp at most once"):
        parse_mesh(text)


def test_single_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="--single is one process, and torchrun started 4"):
        find_place(parse("a model", ["--single"]))


def test_a_mesh_that_does_not_fit_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="dp=2 × tp=2 = 4 ranks, and torchrun started 2"):
        find_place(parse("a model", ["--mesh", "dp=2,tp=2"]))


def test_one_process_feeds_the_whole_batch() -> None:
    batch = {"tokens": torch.arange(8).view(4, 2)}
    assert torch.equal(Place(None, torch.device("cpu"), True, "").share(batch)["tokens"], batch["tokens"])


def test_without_a_compiler_the_backend_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    backend, reason = choose_backend("inductor")
    assert backend == "aot_eager"
    assert reason is not None and "no C++ compiler (a-compiler-that-is-not-there)" in reason and "aot_eager instead of inductor" in reason
    assert choose_backend("eager") == ("eager", None)


def test_torchrun_does_not_take_a_flag_for_its_own() -> None:
    """torchrun refuses a flag of the script that begins several of its own, wherever it stands."""
    launcher = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        assert not [other for other in launcher if other.startswith(flag)], flag


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--resume"], "need --save FOLDER"),
        (["--save-every", "5"], "need --save FOLDER"),
        (["--single", "--save", "x"], "leave out --single"),
    ],
)
def test_flags_that_need_others_are_refused(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("a model", flags)
    assert problem in capsys.readouterr().err
