"""Reading a cluster's YAML: what keys there are, and every mistake at once, each with its place.

A number is an SI number (`3.35e12`), text with a unit (`3.35 TB/s`), or either with where it comes from:
`{value: 3.35 TB/s, source: data sheet}`. Sources are kept as text of the device or the link that they belong to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from autopar.cost.hardware.links import COMMUNICATION_KINDS, WIRINGS
from autopar.errors import AutoparError
from autopar.ir.units import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, parse_quantity


class ClusterError(AutoparError):
    """A cluster's file cannot be used; lists everything that is wrong with it."""


@dataclass(frozen=True)
class Number:
    """A number of `unit`; of none where that is empty. A share is at most 1."""

    unit: str
    required: bool = True
    may_be_zero: bool = False
    is_share: bool = False


@dataclass(frozen=True)
class Count:
    required: bool = True


@dataclass(frozen=True)
class Text:
    required: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """Named fields. One with a field `source` gathers the sources of the numbers in it."""

    fields: Mapping[str, Field]
    required: bool = True


@dataclass(frozen=True)
class Table:
    """Any number of entries with names of the user's; `names` are the only ones allowed, where given."""

    entry: Field
    names: tuple[str, ...] = ()
    required: bool = True


Field = Number | Count | Text | Section | Table

_DTYPES = tuple(sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"))
_PROTOCOL = {"latency": Number(SECONDS, may_be_zero=True), "bandwidth": Number(BYTES_PER_SECOND)}
_LINK = _PROTOCOL | {
    "call": Number(SECONDS, required=False, may_be_zero=True),
    "small": Section(_PROTOCOL, required=False),
    "in_switch": Section(_PROTOCOL, required=False),
    "wiring": Text(required=False, choices=WIRINGS),
    "factors": Table(Number(""), COMMUNICATION_KINDS, required=False),
    "busy": Number("", required=False, may_be_zero=True, is_share=True),
    "source": Text(required=False),
}
_HOST = {
    "instruction": Number(SECONDS, required=False, may_be_zero=True),
    "launch": Number(SECONDS, required=False, may_be_zero=True),
    "parameter": Number(SECONDS, required=False, may_be_zero=True),
    "update": Number(SECONDS, required=False, may_be_zero=True),
    "update_bandwidth": Number(BYTES_PER_SECOND, required=False),
    "source": Text(required=False),
}
_DEVICE = {
    "name": Text(required=False),
    "flops": Table(Number(FLOPS), _DTYPES),
    "memory": Number(BYTES),
    "memory_bandwidth": Number(BYTES_PER_SECOND),
    "launch": Number(SECONDS, may_be_zero=True),
    "host": Section(_HOST, required=False),
    "source": Text(required=False),
}
_CLUSTER = Section(
    {
        "name": Text(),
        "device": Section(_DEVICE),
        "ranks_per_node": Count(),
        "inner": Section(_LINK),
        "outer": Section(_LINK),
        "axes": Table(Section(_LINK), required=False),
        "host": Section(_LINK, required=False),
        "file": Section(_LINK, required=False),
    }
)


def read_cluster(text: str, place: str) -> dict[str, Any]:
    """The checked content of a cluster's YAML: SI numbers, nested as in the file. `place` is what errors call the file.

    Raises `ClusterError` with every problem found.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ClusterError(f"{place}{_position(getattr(error, 'problem_mark', None))} is not YAML: {problem}") from None
    reader = _Reader(place)
    if root is None:
        raise ClusterError(f"{place} is empty; it needs {', '.join(_CLUSTER.fields)}")
    value = reader.read(root, _CLUSTER, ())
    if reader.problems:
        raise ClusterError(f"{place} describes no cluster, {len(reader.problems)} to mend:\n  " + "\n  ".join(reader.problems))
    return value


def _position(mark: Any) -> str:
    return f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _nearest(word: str, known: Iterable[str]) -> str:
    """A hint at what was meant."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


@dataclass
class _Reader:
    place: str
    problems: list[str] = field(default_factory=list[str])
    _sources: list[str] = field(default_factory=list[str])
    _depth: int = 0

    def blame(self, node: yaml.Node, path: tuple[str, ...], what: str) -> None:
        self.problems.append(f"{self.place}{_position(node.start_mark)}: {'.'.join(path) + ' ' if path else ''}{what}")

    def read(self, node: yaml.Node, wanted: Field, path: tuple[str, ...]) -> Any:
        if isinstance(wanted, Section):
            return self._section(node, wanted, path)
        if isinstance(wanted, Table):
            return self._table(node, wanted, path)
        if isinstance(wanted, Number):
            return self._number(node, wanted, path)
        if not isinstance(node, yaml.ScalarNode):
            return self.blame(node, path, "needs one value, not a list or a mapping")
        return self._count(node, path) if isinstance(wanted, Count) else self._text(node, wanted, path)

    def _entries(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, tuple[yaml.Node, yaml.Node]] | None:
        if not isinstance(node, yaml.MappingNode):
            self.blame(node, path, "needs a mapping of names to values")
            return None
        entries: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.blame(key, path, "a key must be a plain name")
            elif key.value in entries:
                self.blame(key, (*path, key.value), "is given twice")
            else:
                entries[key.value] = (key, value)
        return entries

    def _section(self, node: yaml.Node, wanted: Section, path: tuple[str, ...]) -> dict[str, Any] | None:
        entries = self._entries(node, path)
        if entries is None:
            return None
        gathers = "source" in wanted.fields
        before = self._sources, self._depth
        if gathers:
            self._sources, self._depth = [], len(path)
        for name, (key, _) in entries.items():
            if name not in wanted.fields:
                self.blame(key, (*path, name), f"is not known here; {_nearest(name, wanted.fields)}")
        for name, each in wanted.fields.items():
            if each.required and name not in entries:
                self.blame(node, (*path, name), "is missing")
        found = {
            name: self.read(value, wanted.fields[name], (*path, name)) for name, (_, value) in entries.items() if name in wanted.fields
        }
        if gathers:
            found["source"] = "; ".join([*filter(None, [found.get("source")]), *self._sources])
            self._sources, self._depth = before
        return found

    def _table(self, node: yaml.Node, wanted: Table, path: tuple[str, ...]) -> dict[str, Any] | None:
        entries = self._entries(node, path)
        if entries is None:
            return None
        if not entries:
            self.blame(node, path, "needs at least one entry")
        for name, (key, _) in entries.items():
            if wanted.names and name not in wanted.names:
                self.blame(key, (*path, name), f"is not known here; {_nearest(name, wanted.names)}")
        return {name: self.read(value, wanted.entry, (*path, name)) for name, (_, value) in entries.items()}

    def _number(self, node: yaml.Node, wanted: Number, path: tuple[str, ...]) -> float | None:
        if isinstance(node, yaml.MappingNode):
            found = self._section(node, Section({"value": wanted, "source": Text(required=False)}), path)
            if found and found["source"]:
                self._sources.append(f"{'.'.join(path[self._depth :])}: {found['source']}")
            return found.get("value") if found else None
        if not isinstance(node, yaml.ScalarNode):
            return self.blame(node, path, "needs a number")
        try:
            value = parse_quantity(node.value, wanted.unit)
        except ValueError as error:
            return self.blame(node, path, str(error))
        if value < 0 or (value == 0 and not wanted.may_be_zero):
            return self.blame(node, path, f"must be {'at least' if wanted.may_be_zero else 'more than'} 0, got {node.value!r}")
        if wanted.is_share and value > 1:
            return self.blame(node, path, f"is a share and at most 1, got {node.value!r}")
        return value

    def _count(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> int | None:
        if not node.value.isdigit() or int(node.value) < 1:
            return self.blame(node, path, f"must be a whole number of at least 1, got {node.value!r}")
        return int(node.value)

    def _text(self, node: yaml.ScalarNode, wanted: Text, path: tuple[str, ...]) -> str | None:
        if wanted.choices and node.value not in wanted.choices:
            return self.blame(node, path, f"is {node.value!r}; {_nearest(node.value, wanted.choices)}")
        return node.value
