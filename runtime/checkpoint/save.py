"""Write a checkpoint: each process what it holds, each part once, and nothing is there before all of it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.optim import Optimizer

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.background import background, forget_copies, wait_for_saving
from autopar.runtime.checkpoint.data import DATA, Position, StatefulData, joined, place_of, position_of
from autopar.runtime.checkpoint.folders import Writing
from autopar.runtime.checkpoint.held import EMA, MODEL, OPTIMIZER, Held, held_of, model_state, names_of, optimizer_values, the_optimizer
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plan import Part, assign, file_of
from autopar.runtime.checkpoint.ranks import Ranks
from autopar.runtime.checkpoint.snapshot import Snapshot
from autopar.runtime.checkpoint.tensor_file import Written, write
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.train.state import joined_groups


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before it writes."""

    parts: Sequence[Part]
    ties: Mapping[str, str]
    extra: Mapping[str, Any]
    optimizer: Any
    training: Mapping[str, Any]
    note: str
    position: Position | None


@overload
def save(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: Optimizer | None = None,
    note: Any = None,
    *,
    data: StatefulData | None = None,
    keep: int = 3,
    blocking: Literal[True] = True,
) -> Path: ...
@overload
def save(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: Optimizer | None = None,
    note: Any = None,
    *,
    data: StatefulData | None = None,
    keep: int = 3,
    blocking: Literal[False],
) -> Future[Path]: ...


def save(
    folder: str | os.PathLike[str],
    parallel: ParallelModule,
    optimizer: Optimizer | None = None,
    note: Any = None,
    *,
    data: StatefulData | None = None,
    keep: int = 3,
    blocking: bool = True,
) -> Path | Future[Path]:
    """Save model, optimizer, averages, loss scale, seed and counts as the next checkpoint of `folder`; the path of it. Collective.

    Each process writes the parts that it holds, each part is written by one. A checkpoint is there whole or not at all, whenever the
    process is killed; the latest `keep` stay. It is loaded on any mesh.

    folder     on a file system that all processes see
    optimizer  that of a plain loop; the one of `train_step` is the module's own
    note       anything that is JSON, equal on all ranks: the position in the data, the state of a schedule of learning rates
    data       what knows its position in the data and goes on from one, by `state_dict` and `load_state_dict`: a StatefulDataLoader of each
               process. Its state must be numbers, text, None, tensors, and lists, tuples and dicts of these
    blocking   False: copies what is saved into host memory, and gives a future, whose `result()` is the path, for what a thread writes
               meanwhile. The next save or load waits for it, and raises an error that was not asked for; the end of Python waits, too. An
               error is also logged. The memory of the copy is kept for the next one, until the module is gone or a blocking save

    Raises `CheckpointError` where something cannot be saved, on all ranks; then there is no new checkpoint. `AutoparError` between the
    calls of an accumulation.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep} would leave no checkpoint; keep 1 or more")
    ranks = Ranks.of(parallel._world)
    wait_for_saving(parallel._world)
    content = snapshot(parallel, optimizer, note, ranks, data)
    if blocking:
        forget_copies(parallel._world)
        return write_out(Path(folder), content, keep, ranks)
    behind = background(parallel._world)
    copied = behind.copied = ranks.attempt("copy what is to be saved", lambda: content.copied(behind.copied))
    return behind.start(lambda ranks: write_out(Path(folder), copied, keep, ranks), Path(folder))


def snapshot(parallel: ParallelModule, optimizer: Optimizer | None, note: Any, ranks: Ranks, data: StatefulData | None = None) -> Snapshot:
    """What is to be written; the tensors are the module's own. Collective."""
    collected: list[dict[str, dict[str, Held]]] = []

    def collect() -> Told:
        held, told = _collected(parallel, the_optimizer(parallel, optimizer), note, data)
        collected.append(held)
        return told

    everyone = ranks.tell("tell what is to be saved", collect)
    (held,), told = collected, everyone[ranks.rank]
    for rank, other in enumerate(everyone):
        if other.note != told.note:
            raise CheckpointError(
                f"ranks {ranks.rank} and {rank} pass different notes, {told.note[:80]} and {other.note[:80]}: there is one for all. Gather "
                "what they have first (torch.distributed.all_gather_object)"
            )
    tensors, states = assign([each.parts for each in everyone]), joined([each.position for each in everyone])
    if states is not None and len(states) == 1 and DATA in tensors:
        tensors[DATA] = {name: each for name, each in tensors[DATA].items() if name.startswith("0/")}
    index = Index(tensors, told.ties, told.extra, _joined(everyone, parallel), told.training, json.loads(told.note), states)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for kind, of_kind in held.items():
        mine = file_of(kind, ranks.rank)
        for name, each in of_kind.items():
            stored = tensors[kind].get(name)
            if stored is not None and any(piece.file == mine and piece.slices == each.slices for piece in stored.pieces):
                files.setdefault(mine, {})[name] = each.tensor
    return Snapshot(index, files)


def _collected(
    parallel: ParallelModule, optimizer: Optimizer | None, note: Any, data: StatefulData | None
) -> tuple[dict[str, dict[str, Held]], Told]:
    trainer, world, model = parallel._trainer, parallel._world, model_state(parallel)
    position, of_data = position_of(data, place_of(parallel))
    held = {MODEL: model.held, OPTIMIZER: dict[str, Held](), EMA: dict[str, Held]()}

    def keep(name: str, parameter: str, tensor: torch.Tensor) -> None:
        held[OPTIMIZER][name] = held_of(tensor, parameter, world)

    scaler = parallel._scaler
    training = {"seed": parallel.seed, "step": parallel.step, **trainer.counts(), "scaler": scaler and scaler.state_dict()}
    values = None if optimizer is None else optimizer_values(optimizer, names_of(parallel._model), keep)
    held[EMA] |= {name: held_of(each, name, world) for name, each in trainer.averages.items()}
    held |= {DATA: of_data} if of_data else {}
    parts = [each.part(kind, name) for kind, of_kind in held.items() for name, each in of_kind.items()]
    return held, Told(parts, model.ties, model.extra, values, training, _noted(note), position)


def _noted(note: Any) -> str:
    """As JSON text. Raises `CheckpointError` for what comes back as something else."""
    try:
        text = json.dumps(note, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"note= is no JSON: {error}") from error
    if json.loads(text) != note:
        raise CheckpointError(
            f"note= comes back from JSON as something else: {json.loads(text)!r:.200} for {note!r:.200}; use lists, and dicts with names "
            "for keys"
        )
    return text


def _joined(everyone: Sequence[Told], parallel: ParallelModule) -> Any:
    """The optimizers of all stages as one."""
    first = everyone[0].optimizer
    if any((each.optimizer is None) != (first is None) for each in everyone):
        raise CheckpointError("some ranks have an optimizer and others have none: pass the optimizer of each rank")
    if first is None:
        return None
    order = list(names_of(parallel._model).values())
    state = {name: value for each in reversed(everyone) for name, value in each.optimizer["state"].items()}
    groups = joined_groups([each.optimizer["groups"] for each in everyone], order)
    return {"class": first["class"], "groups": groups, "state": {name: state[name] for name in order if name in state}}


def write_out(folder: Path, content: Snapshot, keep: int, ranks: Ranks) -> Path:
    """The path of the new checkpoint. Collective."""
    begun: list[Writing] = []

    def begin() -> str:
        if ranks.rank == 0:
            begun.append(Writing(folder))
        return begun[0].path.name if begun else ""

    try:
        name = ranks.tell(f"begin a checkpoint in {folder}", begin)[0]
        return _written(folder, name, begun, content, keep, ranks)
    finally:
        for writing in begun:
            writing.end()


def _written(folder: Path, name: str, begun: Sequence[Writing], content: Snapshot, keep: int, ranks: Ranks) -> Path:

    def write_files() -> list[Written]:
        path = folder / name
        if not path.is_dir():
            raise CheckpointError(f"{path}, which rank 0 has made, is not there: all ranks must see one file system")
        return [write(path / file, tensors) for file, tensors in content.files.items()]

    written = ranks.tell(f"write to {folder}", write_files)
    sums = {each.name: each.sha256 for of_rank in written for each in of_rank}

    def complete() -> str:
        return begun[0].commit(content.index.text(), sums, keep).name if begun else ""

    return folder / ranks.tell(f"complete the checkpoint in {folder}", complete)[0]
