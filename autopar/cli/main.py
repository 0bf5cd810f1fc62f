"""What `autopar` and `python -m autopar` do: one function a command, each of which prints text, or JSON with --json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import autopar
from autopar.cli.doctor import examined
from autopar.cli.models import load_model
from autopar.cli.plans import compared, explained, read_plan
from autopar.errors import AutoparError, InputError

EPILOG = """\
  autopar plan --model config.json --cluster h100:128 --global-batch 1024 --seq-len 4096
  autopar plan --model package.module:function --cluster 8xa100:64 --global-batch 512 --memory 72GiB --json plans.json
  autopar explain plans.json
  autopar compare plans.json plans.json:3
  autopar doctor
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 2 where something is wrong, and says how to mend it."""
    parser = argparse.ArgumentParser(
        "autopar", description="Plans of training steps.", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands)
    _add(commands, "explain", explain, "a plan of a file that `plan --json` wrote, stage by stage").add_argument("plan", help=_PLAN_HELP)
    both = _add(commands, "compare", compare, "two plans, part by part")
    both.add_argument("plan", help=_PLAN_HELP)
    both.add_argument("other", help=_PLAN_HELP)
    _add(commands, "doctor", doctor, "versions, devices, and what is missing here")
    options = parser.parse_args(arguments)
    try:
        if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
            raise InputError(f"--json {options.json}: there is no folder {Path(options.json).absolute().parent}")
        text, values = options.run(options)
        if options.json == "-":
            print(json.dumps(values, indent=2, allow_nan=False))
            return
        print(text)
        if options.json is not None:
            Path(options.json).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except (AutoparError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
        sys.exit(2)


_PLAN_HELP = "FILE, the first plan in it, or FILE:3, the third"
Answer = tuple[str, Any]


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], Answer], about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON there, too; without FILE it is printed instead")
    parser.set_defaults(run=run)
    return parser


def _add_plan(commands: Any) -> None:
    parser = _add(commands, "plan", plan, "which mesh, schedule, recomputation and ZeRO train a model fastest")
    parser.add_argument(
        "--model", required=True, help="a config.json of transformers, or package.module:function, which gives (model, batch)"
    )
    parser.add_argument("--cluster", required=True, help="kind and number of devices: h100:128, 8xa100:64, cluster.yaml:32")
    parser.add_argument("--global-batch", required=True, type=int, metavar="N", help="samples of a step")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--memory", help="what a device may hold, 72GiB; all it has by default")
    parser.add_argument("--precision", choices=["bf16", "fp16", "float32"], default="bf16")
    parser.add_argument("--profile", default="fused", help="what the software does: fused, eager, megatron, zero-bubble, nanotron")
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="sizes of tp to look at; by default divisors of a node's devices")


def plan(options: argparse.Namespace) -> Answer:
    if options.seq_len is not None and options.seq_len < 1:
        raise InputError(f"--seq-len {options.seq_len}: a sample has one token or more")
    model, batch = load_model(options.model, options.seq_len)
    found = autopar.rank_plans(
        model,
        cluster=options.cluster,
        global_batch=options.global_batch,
        example_inputs=batch,
        memory=options.memory,
        tp=options.tp,
        precision=options.precision,
        profile=options.profile,
    )
    asked = {name: getattr(options, name) for name in ("model", "cluster", "global_batch", "seq_len", "memory", "precision", "profile")}
    return str(found), {"asked": asked, **found.to_dict()}


def explain(options: argparse.Namespace) -> Answer:
    values = read_plan(options.plan)
    return explained(values), values


def compare(options: argparse.Namespace) -> Answer:
    one, other = read_plan(options.plan), read_plan(options.other)
    return compared(one, other), {"plans": [one, other]}


def doctor(options: argparse.Namespace) -> Answer:
    values = examined()
    return "\n".join(f"{name:<20} {value}" for name, value in values.items()), values
