"""`autopar calibrate`: what this machine does in a second, measured, and kept for later."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

import autopar
from autopar.cli.answer import Answer
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.hardware.kept import FOLDER, kept_path
from autopar.driver.progress import progress
from autopar.errors import InputError


def run(options: argparse.Namespace) -> Answer:
    """Of this process's device; under torchrun of the links between all ranks, too. Rank 0 speaks."""
    path = Path(options.output) if options.output is not None else None
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.absolute().parent}")
    starts = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if starts:
        dist.init_process_group()
    try:
        with progress("measuring this machine"):
            found = autopar.calibrate(path=path)
        return _answer(found, path) if not starts or dist.get_rank() == 0 else Answer("")
    finally:
        if starts:
            dist.destroy_process_group()


def _answer(found: Cluster, path: Path | None) -> Answer:
    place = kept_path("cpu" if found.device.name == "cpu" else "cuda")
    places = [f"kept in {place}" if place.is_file() else f"not kept: {place} cannot be written; name a folder in {FOLDER}"]
    places += [f"and in {path}: --cluster {path}:8 plans with it"] if path is not None else []
    values = {"cluster": asdict(found), "kept": str(place) if place.is_file() else None, "output": str(path) if path else None}
    return Answer("\n".join([str(found), *places]), values)
