"""The flags that the training examples share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """One field a flag: `--batch 32` sets `batch`."""

    mesh: dict[str, int]
    single: bool
    backend: str
    device: str
    steps: int
    batch: int
    length: int
    layers: int
    width: int
    heads: int
    dropout: float
    epoch: int
    optimizer: str
    learning_rate: float
    warmup: int
    clip: float
    accumulate: int
    precision: str | None
    zero: int
    seed: int
    text: Path | None
    losses: Path | None
    save: Path | None
    save_every: int
    resume: bool
    sample: int


def parse_mesh(text: str) -> dict[str, int]:
    """`"dp=2,tp=2"` → `{"dp": 2, "tp": 2}`, outermost axis first."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.isdigit() or name not in ("pp", "dp", "tp") or name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write each of pp, dp, tp at most once with its size, as in dp=2,tp=2")
        axes[name] = int(size)
    return axes


def parse(title: str, arguments: Sequence[str] | None = None) -> Options:
    """The options of this run. Prints usage and exits on a flag that is wrong."""
    parser = argparse.ArgumentParser(description=f"Train {title} on real text.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--mesh", type=parse_mesh, default="dp=2,tp=2", help="axes and sizes, outermost first; virtual unless under torchrun"
    )
    where.add_argument("--single", action="store_true", help="plain PyTorch, without autopar")
    where.add_argument("--backend", default="inductor", help="torch.compile backend: inductor, aot_eager, eager")
    where.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=256)
    model.add_argument("--heads", type=int, default=8)
    model.add_argument("--length", type=int, default=128, help="bytes that a sequence has")
    model.add_argument("--dropout", type=float, default=0.0)
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=int, default=120)
    training.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    training.add_argument("--epoch", type=int, default=0, help="sequences in an epoch, whose last batch may be smaller; 0: no epochs")
    training.add_argument("--optimizer", default="AdamW", help="a class of torch.optim")
    training.add_argument("--learning-rate", type=float, default=1e-3)
    training.add_argument("--warmup", type=int, default=20, help="steps over which the learning rate rises; a cosine follows")
    training.add_argument("--clip", type=float, default=1.0, help="the norm that the gradients of a step have at most")
    training.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one update")
    training.add_argument("--precision", choices=("bf16",), help="what matrix products and attention compute in; else float32")
    training.add_argument("--zero", type=int, default=0, choices=range(4), help="the level of ZeRO: what is in parts over dp")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--text", type=Path, help="a text to learn instead of the Python standard library's sources")
    # not "--log": torchrun would take that for an unfinished flag of its own, wherever it stands
    training.add_argument("--losses", type=Path, help="write one line of JSON a step: step, loss, seconds")
    training.add_argument(
        "--save", type=Path, help="a folder of checkpoints: one at the end, and one at Ctrl-C or SIGTERM, which end the run"
    )
    training.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none in between")
    training.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --save, on whatever mesh")
    training.add_argument("--sample", type=int, default=300, help="bytes of text to write at the end")
    parsed = parser.parse_args(arguments)
    if parsed.save is None and (parsed.resume or parsed.save_every):
        parser.error("--save-every and --resume need --save FOLDER")
    if parsed.save is not None and parsed.single:
        parser.error("--save saves what autopar trains: leave out --single")
    return Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})
