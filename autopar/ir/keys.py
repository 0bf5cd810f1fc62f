"""The typed keys under which autopar stores values in `node.meta`. It uses no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from torch.fx import Node

from autopar.ir.sharding import Dims, Sharding, Strategy

T = TypeVar("T")
Phase = Literal["forward", "backward"]


class Key(Generic[T]):
    """A typed slot in `node.meta`; the values are frozen."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, node: Node) -> T | None:
        return node.meta.get(self)  # type: ignore[call-overload]

    def __getitem__(self, node: Node) -> T:
        return node.meta[self]  # type: ignore[index]

    def __setitem__(self, node: Node, value: T) -> None:
        node.meta[self] = value  # type: ignore[index]

    def __contains__(self, node: Node) -> bool:
        return self in node.meta

    def __repr__(self) -> str:
        return f"Key({self.name!r})"


@dataclass(frozen=True)
class Source:
    """Where a node comes from: the user's file and line, and the module path in their model."""

    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""

    @property
    def at(self) -> str:
        """File, line and code, as errors show them."""
        return f"{self.file}:{self.line}  {self.code}" if self.file else "(no source line)"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "(no source line)"
        return f"{place} in {self.module}" if self.module else place


@dataclass(frozen=True)
class Site:
    """Which draws a random op takes: the first stream of its own, by `number`.

    A position of its draws is the linear index; with `strides`, the sum over all dims of index times stride. A dim is (size, stride) of
    each of its parts, outermost first: attention draws in the order of the dropout that it was made of.
    """

    number: int
    strides: tuple[tuple[tuple[int, int], ...], ...] | None = None


PHASE: Key[Phase] = Key("phase")
SOURCE: Key[Source] = Key("source")
# One entry per result of the node: a plain tensor node has one, `native_layer_norm` three.
DIMS: Key[tuple[Dims, ...]] = Key("dims")
# Per result the positions, among its atoms, of those that carry the batch.
BATCH: Key[tuple[tuple[int, ...], ...]] = Key("batch")
# GLOBAL form only, of a parameter that lies somewhere already: atoms that it is to have, if the graph has none that contradict them; those
# of the logical shape and, where it is padded, those of the padded one.
PLACED: Key[tuple[Dims, ...]] = Key("placed")
STRATEGY: Key[Strategy] = Key("strategy")
SHARDING: Key[tuple[Sharding, ...]] = Key("sharding")
# The stage of the pipeline that computes the node; without it, every stage that reads the node computes it for itself.
STAGE: Key[int] = Key("stage")
# GLOBAL form only, of a `save` node: what it saves is to be computed again, so that a budget need not count it.
DROPPED: Key[bool] = Key("dropped")
# GLOBAL form only, of a `save` node: what it saves may be computed again in place of being kept, at the price of these calls of the
# forward, by name, the last of which makes it; of what several read the first bears the price.
REPEATABLE: Key[tuple[str, ...]] = Key("repeatable")
# GLOBAL form only, of a call of the backward that does once more what the forward did: the name of the forward's.
RECOMPUTED: Key[str] = Key("recomputed")
# LOCAL form only: the name of the GLOBAL node whose value this one holds a part of.
ORIGIN: Key[str] = Key("origin")
# LOCAL form only, of a call that makes a copy of a parameter: it runs once a step, ahead of the first microbatch.
COPY: Key[bool] = Key("copy")
# LOCAL form only, of a call that makes one of several pieces of a value, and of the collective that moves it: which.
CHUNK: Key[int] = Key("chunk")
# FORWARD form only, of an op that draws: set before anything is rewritten, so that rewrites change no draw.
SITE: Key[Site] = Key("site")
# FORWARD form only, of what the user computes under a disabled autocast: no precision changes it.
EXACT: Key[bool] = Key("exact")
