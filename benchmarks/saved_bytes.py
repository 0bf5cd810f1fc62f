"""Bytes that a layer of each zoo model saves for its backward, beside what a count by hand says must be saved.

    python -m benchmarks.saved_bytes [--models gpt2,llama] [--list] [--write docs/saved_bytes.md]

On one rank, in float32. Of a layer are the bytes of three less those of two; a layer of a Swin is two blocks. By hand: operands of
contractions, of attention and of norms, and of what is not linear; not what follows from these element by element (a gate's sigmoid, a row
of a norm before its weight), and no masks. `--list` shows the saved values of two layers, largest first, with the lines that make them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.fx import Node

import autopar
from autopar.cost.model import is_view
from autopar.ir.keys import SOURCE
from autopar.ir.markers import save
from autopar.ir.printing import op_name
from autopar.ir.program import Program
from autopar.pipeline.priced import saved_values
from autopar.pipeline.stage_work import Work
from autopar.recompute.choices import layer_of
from tests.support.captures import compiled, keep_captures
from tests.support.models import vision, zoo

MODELS = {**zoo.ZOO, **vision.ZOO}
B, S, H, A = zoo.BATCH, zoo.LENGTH, zoo.WIDTH, zoo.HEADS
# Positions of the vision transformers (16 patches and a class), of a Swin's first stage, and of the first stages of the convnets.
V, W, C = 17, 64, 64
ROWS = B * S * H
PATCHES = B * V * H
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.repeat.default)

# Elements of blocks of a transformer before its norms' rows: norms read and give, queries, keys, values, attention gives.
_BLOCK = {"norms, read and given": 4, "q, k, v": 3, "attention": 1}


def _block(unit: int, mlp: int, **others: int) -> dict[str, int]:
    """A block of `unit` elements a value, whose MLP keeps so many, with rows of statistics: two of each norm, one of each head."""
    return {what: number * unit for what, number in {**_BLOCK, **others, "MLP": mlp}.items()} | {"rows": (4 + A) * unit // H}


# Elements, by what they are of.
BY_HAND: dict[str, dict[str, int]] = {
    "gpt2": _block(ROWS, 8),
    "llama": _block(ROWS, 6) | {"q, k, v": 2 * ROWS, "rows": (2 + A) * B * S},
    "bert": _block(ROWS, 4),
    "vit": _block(PATCHES, 4),
    "beit": _block(PATCHES, 4, layer_scales=2) | {"positions": A * V * V},
    "swin": {what: 2 * size for what, size in _block(B * W * H, 4).items()} | {"positions": 2 * A * 16 * 16},
    "convnext": {"convolution, norm": 3 * B * C * H, "MLP": 8 * B * C * H, "layer scale": B * C * H, "rows": 2 * B * C},
    "resnet": {"convolutions, read and given": (2 * H + 4 * (H // 2) + 2 * H) * B * C},
}


def program_of(name: str, num_layers: int) -> tuple[Program, autopar.ParallelModule]:
    torch.manual_seed(0)
    case = MODELS[name](num_layers).to(torch.float32)
    parallel = compiled(case.model, {"dp": 1}, case.batch)
    return parallel.compiled.program, parallel


def layer_bytes(name: str) -> float:
    three, two = (program_of(name, number)[1].summary()["memory"]["saved_activations"] for number in (3, 2))
    return three - two


def waste(program: Program) -> list[str]:
    """Saved values that are copies of what was expanded, and calls that join something with nothing."""
    found = [f"{node} joins nothing" for node in program.graph.nodes if node.target is torch.ops.aten.cat.default and _has_empty(node)]
    for node in program.graph.nodes:
        if node.target is save and (grown := _expanded(node.all_input_nodes[0])) is not None:
            found.append(f"{node} keeps what {grown} expands")
    return found


def _has_empty(cat: Node) -> bool:
    return any(not operand.meta["val"].numel() for operand in cat.all_input_nodes)


def _expanded(node: Node) -> Node | None:
    """The call that makes `node`, or what it is a copy of, larger than its operand by repeating that; None where there is none."""
    is_copy = False
    while node.op == "call_function" and (is_view(node) or node.target in _COPIES):
        source = node.all_input_nodes[0]
        is_copy = is_copy or node.target in _COPIES
        if is_copy and node.meta["val"].numel() > source.meta["val"].numel():
            return node
        node = source
    return None


def listed(name: str) -> Iterator[str]:
    program, _ = program_of(name, 2)
    sizes: Counter[tuple[str, str, str]] = Counter()
    for node in saved_values(Work(program), 0):
        source = SOURCE.get(node)
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        where = f"{Path(source.file).name}:{source.line}" if source and source.file else ""
        shape = " ".join(str(list(each.shape)) for each in values if each is not None)
        sizes[layer_of(source.module) if source else "", f"{op_name(node.target)} {shape}", where] += sum(
            each.numel() * each.element_size() for each in values if each is not None
        )
    for (layer, op, where), size in sorted(sizes.items(), key=lambda each: (each[0][0], -each[1])):
        yield f"  {size:>9}  {layer or '-':<24} {op:<60} {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_captures()
    lines = ["| model | saved by a layer, kB | by hand, kB | ratio | by hand, of what |", "|---|---|---|---|---|"]
    for name in options.models.split(","):
        ours, hand = layer_bytes(name), 4 * sum(BY_HAND[name].values())
        parts = ", ".join(f"{what} {4 * size / 1e3:.1f}" for what, size in BY_HAND[name].items())
        lines.append(f"| {name} | {ours / 1e3:.1f} | {hand / 1e3:.1f} | {ours / hand:.2f} | {parts} |")
        print(lines[-1], *waste(program_of(name, 2)[0]), sep="\n", flush=True)
        if options.list:
            print(*listed(name), sep="\n", flush=True)
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
