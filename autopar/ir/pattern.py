"""Patterns of names. Repeated layers as one line: `h.0.fc`, `h.1.fc`, … → `h.*.fc`; and which names a user's pattern means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

# Names as like as this are typing errors of one another.
_ALIKE = 0.6
# How many names are given.
_NAMED = 4
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def pattern_of(name: str) -> str:
    """`name` with each number between dots as `*`."""
    return _NUMBER.sub("*", name)


def folded(names: Sequence[str], others: Iterable[str] = ()) -> str:
    """One name for `names`, all of one pattern: `h.*.fc`, or `h.{0,3-5}.fc` where `others` of the pattern are not among them."""
    pattern = pattern_of(names[0])
    if len(names) == 1:
        return names[0]
    rest = {name for name in others if pattern_of(name) == pattern} - set(names)
    numbers = [tuple(int(found) for found in _NUMBER.findall(name)) for name in names]
    varying = [place for place in range(len(numbers[0])) if len({number[place] for number in numbers}) > 1]
    if len(varying) != 1 or (not rest and len(numbers[0]) == 1):
        return pattern if not rest else f"{pattern} ({names[0]}, … {len(names)} of them)"
    shown = [str(number) for number in numbers[0]]
    shown[varying[0]] = f"{{{_ranges(sorted(number[varying[0]] for number in numbers))}}}" if rest else "*"
    parts = iter(shown)
    return _NUMBER.sub(lambda _: next(parts), names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 3, 4, 5]` → `0,3-5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def matches_name(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches; `*` stands for any text, dots included."""
    return name == pattern or fnmatchcase(name, pattern)


def matches_module(path: str, pattern: str) -> bool:
    """Whether a module's path matches, part by part: `h.*` means the layers, not what is in them. A leading `*` stands for any parents."""
    wanted, parts = pattern.split("."), path.split(".")
    if wanted[0] == "*":
        parts = parts[-len(wanted) :]
    return len(parts) == len(wanted) and all(fnmatchcase(part, each) for part, each in zip(parts, wanted, strict=True))


def is_meant(name: str, pattern: str) -> bool:
    """Whether a pattern for reading means `name`: it matches, it is a part of it where it has no wildcard, or it names a module that
    `name` lies in: `model.layers.0` and `layers.?` mean all that is in them."""
    if not any(sign in pattern for sign in "*?["):
        return pattern == name or f".{pattern}." in f".{name}." or (pattern in name and not pattern[-1:].isdigit())
    parts = name.split(".")
    return fnmatchcase(name, pattern) or any(matches_module(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def near_names(pattern: str, names: Iterable[str]) -> str:
    """The names most like `pattern`, then the first ones: `h.0.fc, h.1.fc, …`."""
    distinct = list(dict.fromkeys(names))
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(pattern)
    likeness: dict[str, float] = {}
    for name in distinct:
        matcher.set_seq1(name)
        likeness[name] = matcher.ratio() if matcher.quick_ratio() >= _ALIKE else 0.0
    found = sorted(distinct, key=lambda name: -likeness[name] if likeness[name] >= _ALIKE else 0.0)
    return ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "") if found else "none"
