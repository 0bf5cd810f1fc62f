"""What `autopar` and `python -m autopar` do: one function a command, each of which gives text, and values for --json."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import autopar
from autopar.cli import calibration, memory, simulation
from autopar.cli.answer import INTERRUPTED, Answer
from autopar.cli.doctor import examined
from autopar.cli.models import batch_dims_of_text, load_model
from autopar.cli.places import devices_of
from autopar.cli.plans import compared, explained, read_plan
from autopar.errors import AutoparError, InputError
from autopar.foresight.constants import PROFILES
from autopar.foresight.offload import ASKED, HOST_BYTES

EPILOG = """\
  autopar plan --model config.json --cluster h100:128 --global-batch 1024 --seq-len 4096
  autopar plan --model package.module:function --cluster 8xa100:64 --global-batch 512 --memory 72GiB --json plans.json
  autopar explain plans.json
  autopar compare plans.json plans.json:3
  autopar simulate plans.json --trace out.json
  autopar estimate-memory --model config.json --mesh dp=2,tp=4 --cluster h100:8 --batch 16 --seq-len 4096
  autopar calibrate
  autopar doctor

Exit codes: 0; 2 where something is wrong, with what would work; 130 after Ctrl-C, with the best that was found so far.
"""
_PLAN_HELP = "FILE, the first plan in it, or FILE:3, the third"
_MODEL_HELP = "a config.json of transformers, or package.module:function, which gives (model, batch)"
_CLUSTER_HELP = "kind and number of devices: h100:128, 8xa100:64, cluster.yaml:32"
_ASKED = ("model", "cluster", "global_batch", "seq_len", "batch_dims", "memory", "precision", "kernels", "optimizer", "profile", "offload")
_DIMS_HELP = "which dim of inputs counts samples: 1 for [length, batch], or by name, src=1,labels=0,mask=none; dim 0 by default"
_KERNELS = ["auto", "triton", "aten", "off"]
_PRECISIONS = ["bf16", "fp16", "float32"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 2 where something is wrong, and says how to mend it; with 130 where Ctrl-C stopped it."""
    options = _parser().parse_args(arguments)
    try:
        if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
            raise InputError(f"--json {options.json}: there is no folder {Path(options.json).absolute().parent}")
        if getattr(options, "seq_len", None) is not None and options.seq_len < 1:
            raise InputError(f"--seq-len {options.seq_len}: a sample has one token or more")
        if hasattr(options, "batch_dims"):
            options.batch_dims = batch_dims_of_text(options.batch_dims)
        answer: Answer = options.run(options)
        _say(answer, options.json)
    except (AutoparError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("autopar: stopped before anything was found", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if answer.code:
        sys.exit(answer.code)


def _say(answer: Answer, place: str | None) -> None:
    if place == "-":
        print(json.dumps(answer.json, indent=2, allow_nan=False))
        return
    try:
        print(*([answer.text] if answer.text else []), sep="\n", end="\n" if answer.text else "", flush=True)
    except BrokenPipeError:  # `autopar plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if place is not None:
        Path(place).write_text(json.dumps(answer.json, indent=2, allow_nan=False) + "\n", encoding="utf-8")


# ---- what commands take


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "autopar", description="Plans of training steps.", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_plan(commands)
    _add(commands, "explain", explain, "a plan of a file that `plan --json` wrote, stage by stage").add_argument("plan", help=_PLAN_HELP)
    both = _add(commands, "compare", compare, "two plans, part by part")
    both.add_argument("plan", help=_PLAN_HELP)
    both.add_argument("other", help=_PLAN_HELP)
    _add_simulate(commands)
    _add_memory(commands)
    measured = _add(commands, "calibrate", calibration.run, "measure this machine; under torchrun its links, too")
    measured.add_argument("--output", metavar="FILE.yaml", help="write the cluster there, too, as --cluster reads it")
    _add(commands, "doctor", doctor, "versions, devices, and what is missing here")
    return parser


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], Answer], about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON there, too; without FILE it is printed instead")
    parser.set_defaults(run=run)
    return parser


def _add_plan(commands: Any) -> None:
    parser = _add(commands, "plan", plan, "which mesh, schedule, recomputation and ZeRO train a model fastest")
    parser.add_argument("--model", required=True, help=_MODEL_HELP)
    parser.add_argument("--cluster", required=True, help=_CLUSTER_HELP)
    parser.add_argument("--global-batch", required=True, type=int, metavar="N", help="samples of a step")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--batch-dims", metavar="DIMS", help=_DIMS_HELP)
    parser.add_argument("--memory", help="what a device may hold, 72GiB; all it has by default")
    parser.add_argument("--precision", choices=_PRECISIONS, default="bf16")
    parser.add_argument(
        "--kernels", choices=_KERNELS, default="off", help="as autopar.compile has it; by default ops stay as they are written"
    )
    parser.add_argument("--optimizer", help="whose state is counted: adamw, sgd, momentum, …; by default the profile's, adam's")
    parser.add_argument("--profile", default="fused", help=f"what the software does: {', '.join(PROFILES)}")
    parser.add_argument("--offload", choices=("none", *ASKED), default="needed", help="what may lie on the host; needed: what makes it fit")
    parser.add_argument("--host-memory", default=HOST_BYTES, help="what the host has for each device, 256GiB; 128 GB by default")
    parser.add_argument("--tp", type=int, nargs="+", metavar="N", help="sizes of tp to look at; by default divisors of a node's devices")


def _add_simulate(commands: Any) -> None:
    parser = _add(commands, "simulate", simulation.run, "the step of a plan, clocked, with a timeline")
    parser.add_argument("plan", help=f"{_PLAN_HELP}; or a file of Plan.save, with the options below")
    parser.add_argument("--trace", metavar="FILE.json", help="write a timeline for ui.perfetto.dev: one rank of each stage")
    saved = parser.add_argument_group("for a plan that Plan.save wrote")
    saved.add_argument("--model", help=_MODEL_HELP)
    saved.add_argument("--cluster", help="kind of devices: h100, 8xa100, cluster.yaml")
    saved.add_argument("--global-batch", type=int, metavar="N", help="samples of a step")
    saved.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    saved.add_argument("--batch-dims", metavar="DIMS", help=_DIMS_HELP)


def _add_memory(commands: Any) -> None:
    parser = _add(commands, "estimate-memory", memory.run, "what ranks would hold in a step, whether it fits, and what to change first")
    parser.add_argument("--model", required=True, help=_MODEL_HELP)
    parser.add_argument("--mesh", help="axes and their sizes: dp=2,tp=4; without it the best mesh of the cluster's devices")
    parser.add_argument("--cluster", help=f"{_CLUSTER_HELP}; without it nothing is priced, and no device is known to be too small")
    parser.add_argument("--batch", required=True, type=int, metavar="N", help="samples of a step, on all ranks together")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of a sample")
    parser.add_argument("--batch-dims", metavar="DIMS", help=_DIMS_HELP)
    parser.add_argument("--precision", choices=_PRECISIONS, default="bf16", help="what products compute in; masters are float32")
    parser.add_argument("--zero", type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--recompute", choices=["none", "selective", "full"])
    parser.add_argument("--kernels", choices=_KERNELS, default="auto", help="as autopar.compile has it")
    parser.add_argument("--optimizer", default="adamw", help="whose state is counted: adamw, sgd, momentum, …")
    parser.add_argument(
        "--num-microbatches", type=int, metavar="N", help="slices of a replica's share; by default 1, and 4 · pp in a pipeline"
    )
    parser.add_argument("--schedule", choices=["1f1b", "zb-h1", "zb-v", "gpipe"], help="the order of a pipeline")
    parser.add_argument("--memory", help="what a device may hold, 72GiB; all it has by default")


# ---- commands


def plan(options: argparse.Namespace) -> Answer:
    """The plans that fit; with exit code 2 where there is none, and with 130 those found until Ctrl-C."""
    cluster, number = devices_of(options.cluster)
    model, batch = load_model(options.model, options.seq_len)
    found = autopar.rank_plans(
        model,
        cluster=cluster,
        num_devices=number,
        global_batch=options.global_batch,
        example_inputs=batch,
        memory=options.memory,
        tp=options.tp,
        precision=options.precision,
        profile=options.profile,
        offload=None if options.offload == "none" else options.offload,
        host_memory=options.host_memory,
        batch_dims=options.batch_dims,
        kernels=options.kernels,
        optimizer=options.optimizer,
    )
    if not found.plans and found.is_complete:
        why = found.advice or tuple(dict.fromkeys(reason for _, reason in found.missing))[:2]
        raise InputError(f"no plan for {number} devices of {cluster.name}: {'; '.join(why)}")
    asked = {name: getattr(options, name) for name in _ASKED}
    return Answer(str(found), {"asked": asked, **found.to_dict()}, 0 if found.is_complete else INTERRUPTED)


def explain(options: argparse.Namespace) -> Answer:
    values = read_plan(options.plan)
    return Answer(explained(values), {"plans": [values]})


def compare(options: argparse.Namespace) -> Answer:
    one, other = read_plan(options.plan), read_plan(options.other)
    return Answer(compared(one, other), {"plans": [one, other]})


def doctor(options: argparse.Namespace) -> Answer:
    values = examined()
    return Answer("\n".join(f"{name:<20} {value}" for name, value in values.items()), values)
