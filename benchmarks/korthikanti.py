"""Bytes that a GPT layer saves for its backward, and FLOPs, against the formulas of Korthikanti et al., arXiv:2205.05198 (table 2).

    python -m benchmarks.korthikanti

Their layer in plain PyTorch, in float16, with dropout, on meta, as a captured graph keeps it. Bytes of a layer are those of three less
those of two. Each row names what their formula counts and a graph of ours does not hold, or holds besides: the printed formula with
these terms is what is compared, within 2 %. What neither has a term for (log-sum-exps of attention, statistics of norms) is within
that. Rows with sequence parallelism are not compared yet.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.parsing.sympy_parser import implicit_multiplication, parse_expr, standard_transformations
from torch import Tensor, nn

import autopar
from autopar.pipeline.schedules import generate
from autopar.reports.entries import Summary

TABLE = Path(__file__).parent / "published" / "korthikanti_2022_formulas.csv"
TOLERANCE = 0.02
# Sequence, microbatch, width, heads, vocabulary; ranks along tp.
S, B, H, A, V, T = 1024, 2, 2048, 16, 8192, 4
MASKS = "2 s b h"
SCORES = "5 a s**2 b"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.norm_attention(x)).view(batch, length, 3, A, H // A).permute(2, 0, 3, 1, 4)
        weights = self.drop(torch.softmax(query @ key.transpose(-1, -2) / (H // A) ** 0.5, -1))
        x = x + self.drop(self.out((weights @ value).transpose(1, 2).reshape(batch, length, H)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm_mlp(x)))))


class GPT(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, H), nn.Embedding(S, H)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm, self.head, self.drop = nn.LayerNorm(H), nn.Linear(H, V, bias=False), nn.Dropout(0.1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places.weight)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


@cache
def summary(num_layers: int, axes: tuple[tuple[str, int], ...], number: int = 1, **options: Any) -> Summary:
    with torch.device("meta"):
        model, tokens = GPT(num_layers).half(), torch.zeros(number * B, S, dtype=torch.int64)
    chosen: dict[str, Any] = {key: dict(value) if isinstance(value, tuple) else value for key, value in options.items()}
    if chosen.pop("interleaved", False):
        chosen["schedule"] = generate("interleaved", dict(axes)["pp"], number, 2)
    mesh = autopar.virtual_mesh(**dict(axes))
    inputs = {"tokens": tokens, "labels": tokens}
    return autopar.compile(
        model, mesh, example_inputs=inputs, backend="eager", cluster="8xa100", num_microbatches=number, **chosen
    ).summary()


def of_layer(**options: Any) -> float:
    axes = options.pop("axes", (("dp", 1),))
    three, two = (summary(number, axes, **options)["memory"]["saved_activations"] for number in (3, 2))
    return three - two


@dataclass(frozen=True)
class Row:
    """What of a printed formula, by its name in the table, is compared: `terms` are added to it, with what they are."""

    name: str
    ours: Callable[[], float]
    terms: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    note: str = ""


NOT_HELD = {f"-{MASKS}": "dropout masks: drawn again", f"-{SCORES}": "scores: one kernel, which remakes them"}
TP = (("tp", T),)
# Weights whole, and what norms make.
WHOLE = (("layers.*", ()), ("layers.*.norm_attention", ()), ("layers.*.norm_mlp", ()))
ROWS = [
    Row("no parallelism", of_layer, NOT_HELD),
    Row(
        "tensor parallel",
        lambda: of_layer(axes=TP, pins=WHOLE),
        {f"-{MASKS}": "dropout masks", f"-{SCORES}/t": "scores"},
        note="weights and norms pinned whole",
    ),
    Row("tensor parallel + selective recompute", lambda: of_layer(axes=TP, pins=WHOLE), {f"-{MASKS}": "dropout masks"}),
    Row("full recompute", lambda: of_layer(recompute="full")),
]


def printed(name: str) -> sympy.Expr:
    with TABLE.open(encoding="utf-8") as file:
        text = next(row["bytes_per_layer_or_formula"] for row in csv.DictReader(file) if row["configuration"] == name)
    return parsed(text.partition("[")[0])


def parsed(text: str) -> sympy.Expr:
    names = {name: sympy.Symbol(name) for name in "s b h a v t p m L B".split()}
    return parse_expr(text.replace("^", "**"), local_dict=names, transformations=(*standard_transformations, implicit_multiplication))


def compared() -> Iterator[tuple[Row, float, float, float]]:
    """Each row with the printed formula at our sizes, the same with its terms, and ours."""
    for row in ROWS:
        sizes = {"s": S, "b": B, "h": H, "a": A, "v": V, "t": T} | dict(row.sizes)
        formula = printed(row.name)
        left = formula + sum(map(parsed, row.terms))
        at = [(sympy.Symbol(name), sympy.Integer(size)) for name, size in sizes.items()]
        yield row, float(formula.subs(at)), float(left.subs(at)), row.ours()


def main() -> None:
    print(f"s {S}, b {B}, h {H}, a {A}, v {V}, t {T}")
    for row, formula, left, ours in compared():
        mark = "" if abs(ours / left - 1) <= TOLERANCE else "   <-- differs"
        print(f"{row.name:<42} printed {formula:.5g}, less what is named {left:.5g}, here {ours:.5g} ({ours / left - 1:+.2%}){mark}")
        for term, what in row.terms.items():
            print(f"    {term:<16} {what}")
        if row.note:
            print(f"    {row.note}")


if __name__ == "__main__":
    main()
