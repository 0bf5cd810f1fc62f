"""Makes what fails smaller, as long as it fails: fewer options, ranks, steps, lines, terms of the loss, outputs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.support.random_models.cases import Case
from tests.support.random_models.model import RandomModel

T = TypeVar("T")
_MESHES = ({"dp": 2}, {"tp": 2}, {"pp": 2})
_NEEDED = ("backend", "outputs")


def shrink(large: T, smaller: Callable[[T], Iterator[T]], fails: Callable[[T], bool], seconds: float = 300) -> T:
    """The smallest of those that `smaller` leads to, one after another, and that fail; what is found within `seconds`."""
    end = time.monotonic() + seconds
    found: T | None = large
    while found is not None:
        large = found
        found = next((each for each in smaller(large) if time.monotonic() < end and fails(each)), None)
    return large


def smaller_cases(case: Case) -> Iterator[Case]:
    for name in case.options:
        if name not in _NEEDED:
            yield replace(case, options={other: value for other, value in case.options.items() if other != name})
    for mesh in _MESHES:
        if sum(case.mesh.values()) > 2:
            yield replace(case, mesh=mesh)
    for number in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:number] + case.steps[number + 1 :])
    for model in smaller_models(case.model):
        yield replace(case, model=model)


def smaller_models(model: RandomModel) -> Iterator[RandomModel]:
    """Those with one line less, from the last to the first, or with a shorter loss or output."""
    lines = model.lines
    for number in reversed(range(len(lines))):
        before, line, after = lines[:number], lines[number], lines[number + 1 :]
        if line.startswith("loss = "):
            terms = line.removeprefix("loss = ").split(" + ")
            shorter = [" + ".join(terms[:i] + terms[i + 1 :]) for i in range(len(terms)) if len(terms) > 1]
            yield from (model.of_lines((*before, f"loss = {each}", *after)) for each in shorter)
        elif line.startswith("return "):
            outputs = re.findall(r"'o\d+': \w+", line)
            yield from (model.of_lines((*before, line.replace(f", {each}", ""))) for each in outputs)
        else:
            yield from _without(model, before, line, after)


def _without(model: RandomModel, before: tuple[str, ...], line: str, after: tuple[str, ...]) -> Iterator[RandomModel]:
    """The line gone: what it gave is not read, or what it read is read in its place."""
    named = re.match(r"(v\d+)(?:, v\d+)* = (.*)", line)
    used = dict.fromkeys(re.findall(r"\b[vx]\d+\b", named[2])) if named else {}
    for text in [after, *(tuple(re.sub(rf"\b{named[1]}\b", other, each) for each in after) for other in used if named)]:
        smaller = model.of_lines((*before, *text))
        if smaller.inputs:
            yield smaller
