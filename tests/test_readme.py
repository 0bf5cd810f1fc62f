"""What the README tells a newcomer to do works: its Python runs, first block to last, on the default backend; its commands are CI's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What cannot be run as it stands, such as a mesh of sixteen GPUs, and what is run instead. At most three.
SUBSTITUTIONS: dict[str, str] = {}
# What CI runs otherwise than a newcomer: the README's command, and CI's.
SHORTENED = {"examples/train_gpt.py --mesh dp=2,tp=2": "examples/train_gpt.py --mesh dp=2,tp=2 --steps 20"}


def blocks(language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, each with the number of lines before it."""
    found: list[tuple[int, str]] = []
    inside: tuple[int, str] | None = None  # where the block around this line begins, and its language
    lines = README.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if inside is not None and inside[1] == language:
                found.append((inside[0], "".join(lines[inside[0] : number])))
            inside = (number + 1, line.removeprefix("```").strip()) if inside is None else None
    return found


@pytest.mark.equivalence  # minutes of Inductor
def test_every_block_of_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # blocks write files
    assert len(SUBSTITUTIONS) <= 3 and all(each in README for each in SUBSTITUTIONS)
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their module
    for lines_before, text in blocks("python"):
        for written, run in SUBSTITUTIONS.items():
            text = text.replace(written, run)
        exec(compile("\n" * lines_before + text, ROOT / "README.md", "exec"), vars(module))


def test_the_commands_of_a_newcomer_are_run_by_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("make --no-print-directory", "make")
    wanted = [
        line.split("#")[0].split() for _, text in blocks("") for line in text.splitlines() if re.match(r"make |\.venv/bin/torchrun", line)
    ]
    assert ["make", "demo"] in wanted and ["make", "test"] in wanted and len(wanted) >= 3
    commands = [line.split("|")[0].split() for line in script.splitlines()]
    for command in wanted:
        text = " ".join(command)
        for written, run in SHORTENED.items():
            text = text.replace(written, run)
        assert text.split() in commands, f"the README says {' '.join(command)!r}, and .ci/run does not run {text!r}"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing, f"the README links to {missing}"


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:autopar|passes|runtime|kernels|tests|benchmarks|docs)/[\w./]+\.(?:py|md))`", text))
    assert len(named) > 10
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"CONTRIBUTING.md names {missing}"
