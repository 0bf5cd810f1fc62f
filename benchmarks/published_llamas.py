"""The H100 table of `benchmarks/published`: Llamas under nanotron's plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.foresight.step import Step
from autopar.foresight.work import ModelWork
from benchmarks.published_models import LLAMA, Llama
from benchmarks.published_rows import Case, Compared, Row, Tables

CLUSTER = "8xH100"
# The small models tie the head to the embeddings.
TIED = ("1B", "3B")
FEW_NODES = 32
USUAL_MFU = 20.0
FAR = 0.2


@cache
def llama(vocabulary: int, num_layers: int, width: int, num_heads: int, hidden: int, length: int, is_tied: bool, tp: int) -> ModelWork:
    with torch.device("meta"):
        model = Llama(vocabulary, num_layers, width, num_heads, hidden, is_tied)
        tokens = torch.zeros(2, length, dtype=torch.int64)
    pins = {name: pin for name, pin in LLAMA.items() if not (is_tied and name == "head.weight")} if tp > 1 else None
    return measure_work(model, {"tokens": tokens, "labels": tokens}, CLUSTER, tp, pins)


def work_of(row: Row) -> ModelWork:
    vocabulary, layers, width, heads, hidden, length = (int(row[name]) for name in ("vocab", "layers", "hidden", "heads", "ffn", "seq"))
    return llama(vocabulary, layers, width, heads, hidden, length, row["model"] in TIED, int(row["tp"]))


def ultrascale(tables: Tables) -> Iterator[Case]:
    """Rows that ran. Printed are tokens a GPU and second; the batch is dp · microbatch · accumulation, not always the one named."""
    for row in tables["ultrascale_h100_all_runs"]:
        if row["status"] != "ok" or not _is_expressed(row):
            continue
        dp, samples, number = (int(row[name]) for name in ("dp", "micro_batch", "grad_accum"))
        printed = dp * samples * number * int(row["seq"]) / (int(row["gpus"]) * float(row["tokens_per_s_per_gpu"]))
        where = {name: row[name] for name in ("model", "nodes", "dp", "tp", "pp", "micro_batch", "grad_accum", "zero_stage", "mfu_pct")}
        yield Case(where, printed, _step(row), float(row["memory_GB"]))


def _is_expressed(row: Row) -> bool:
    """A stage without a layer cannot be."""
    return int(row["pp"]) <= int(row["layers"])


def _step(row: Row) -> Step:
    tp, pp, dp, samples, number = (int(row[name]) for name in ("tp", "pp", "dp", "micro_batch", "grad_accum"))
    return step_of(
        work_of(row),
        cluster=CLUSTER,
        mesh={"pp": pp, "dp": dp, "tp": tp},
        global_batch=dp * samples * number,
        microbatch=samples,
        zero=int(row["zero_stage"]),
        profile="nanotron",
    )


def memories(rows: Sequence[Compared]) -> dict[str, list[float]]:
    """Errors of the fullest rank's memory, by whether there is a pipeline."""
    errors = [(row.where["pp"] == "1", row.others["predicted GiB"] / row.others["GiB"] - 1) for row in rows]
    return {
        "all that ran": [error for _, error in errors],
        "no pipeline": [error for is_plain, error in errors if is_plain],
        "pipelines": [error for is_plain, error in errors if not is_plain],
    }


def runs(row: Row) -> bool:
    """Whether a run is expected to run: 1F1B of nanotron wants as many microbatches as stages before the last, a stage wants something to
    compute (the last may have the loss alone), and the fullest rank has to fit into the device."""
    if not _is_expressed(row) or int(row["grad_accum"]) < int(row["pp"]) - 1:
        return False
    found = _step(row).prediction()
    return found.fits and sum(not stage.forward for stage in found.stages) <= 1


def right_of_runs(tables: Tables) -> dict[str, Any]:
    """The share of all rows, those that crashed included, of which it is said rightly whether they ran."""
    rows = tables["ultrascale_h100_all_runs"]
    found = [(runs(row), row["status"] == "ok") for row in rows]
    return {
        "rows": len(rows),
        "right %": 100 * sum(said == ran for said, ran in found) / len(rows),
        "ran, and was not to": sum(ran and not said for said, ran in found),
        "did not run, and was to": sum(said and not ran for said, ran in found),
    }


def is_plain(where: Mapping[str, str]) -> bool:
    """Few nodes and no pipeline."""
    return where["pp"] == "1" and int(where["nodes"]) <= FEW_NODES


def subsets(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    """By columns of the configuration, and by the printed MFU."""
    plain = [row for row in rows if is_plain(row.where)]
    return {
        f"up to {FEW_NODES} nodes, no pipeline": plain,
        f"of these MFU ≥ {USUAL_MFU:.0f}": [row for row in plain if float(row.where["mfu_pct"]) >= USUAL_MFU],
    }


def overestimated(rows: Sequence[Compared]) -> dict[str, Any]:
    """The share of rows whose step is predicted more than 20 % too long."""
    return {"overestimated %": 100 * sum(row.error > FAR for row in rows) / len(rows)}
