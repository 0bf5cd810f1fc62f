"""The A100 tables of `benchmarks/published`: GPTs under Megatron's plans."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from autopar.cost.hardware.cluster import Cluster
from autopar.doors.measure_work import measure_work
from autopar.doors.predict import step_of
from autopar.foresight.constants import Constants, SoftwareProfile
from autopar.foresight.price import Prices, Seconds
from autopar.foresight.step import Step
from autopar.foresight.work import ModelWork
from autopar.ir.mesh import Mesh
from benchmarks.published_models import GPT, MEGATRON, SPLIT_SEQUENCE, WHOLE_OUTPUTS
from benchmarks.published_rows import Case, Compared, Row, Tables

CLUSTER = "8xA100"
VOCABULARY = 51200


@cache
def gpt(width: int, num_heads: int, num_layers: int, length: int, tp: int, splits_sequence: bool) -> ModelWork:
    with torch.device("meta"):
        model = GPT(VOCABULARY, num_layers, width, num_heads, length)
        tokens = torch.zeros(2, length, dtype=torch.int64)
    pins = {**MEGATRON, **(SPLIT_SEQUENCE if splits_sequence else WHOLE_OUTPUTS)} if tp > 1 else None
    return measure_work(model, {"tokens": tokens, "labels": tokens}, CLUSTER, tp, pins, "fp16")


def _of(row: Row, tp: int, length: int, splits_sequence: bool = False) -> ModelWork:
    width, num_heads, num_layers = (int(row[name]) for name in ("hidden", "heads", "layers"))
    return gpt(width, num_heads, num_layers, length, tp, splits_sequence)


def megatron_work(row: Row) -> ModelWork:
    return _of(row, int(row["tp"]), int(row["seq"]))


def megatron_step(row: Row, work: ModelWork) -> Step:
    """The plan that the paper ran."""
    layers, tp, pp, gpus = (int(row[name]) for name in ("layers", "tp", "pp", "gpus"))
    chunk = row["layers_per_virtual_stage_script"]
    chunks = layers // pp // int(chunk) if chunk else 1
    return step_of(
        work,
        cluster=CLUSTER,
        mesh={"pp": pp, "dp": gpus // (tp * pp), "tp": tp},
        global_batch=int(row["global_batch"]),
        microbatch=int(row["micro_batch_script"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        recompute="full",
        profile="megatron",
    )


def megatron(tables: Tables) -> Iterator[Case]:
    """Printed are TFLOP/s a GPU, counted by equation 3 of the paper with recomputation."""
    for row in tables["megatron_2021_table1"]:
        width, layers, gpus, batch, length, symbols = (
            int(row[name]) for name in ("hidden", "layers", "gpus", "global_batch", "seq", "vocab")
        )
        flops = 96 * batch * length * layers * width**2 * (1 + length / (6 * width) + symbols / (16 * layers * width))
        printed = flops / (gpus * float(row["tflops_per_gpu"]) * 1e12)
        yield Case({"model": f"{row['params_B']}B", "gpus": gpus}, printed, megatron_step(row, megatron_work(row)))


def korthikanti(tables: Tables) -> Iterator[Case]:
    """ "Full" is without sequence parallelism, "present work" with it and with selective recomputation."""
    times = {row["model"]: row for row in tables["korthikanti_2022_table5_iteration"]}
    for row in tables["korthikanti_2022_table3_configs"]:
        tp, pp, chunks = (int(row[name]) for name in ("tp", "pp", "interleave_m"))
        for column, recompute in (("full_recompute_s", "full"), ("present_work_s", "selective")):
            step = step_of(
                _of(row, tp, int(row["seq"]), splits_sequence=recompute == "selective"),
                cluster=CLUSTER,
                mesh={"pp": pp, "dp": int(row["gpus"]) // (tp * pp), "tp": tp},
                global_batch=int(row["global_batch"]),
                microbatch=int(row["micro_batch"]),
                schedule="interleaved" if chunks > 1 else "1f1b",
                num_chunks=chunks,
                recompute=recompute,
                profile="megatron-2022",
            )
            yield Case({"model": row["model"], "recompute": recompute}, float(times[row["model"]][column]), step)


def korthikanti_layers(tables: Tables) -> Iterator[Compared]:
    """Forward and backward of one layer."""
    shapes = {row["model"]: row for row in tables["korthikanti_2022_table3_configs"]}
    for row in tables["korthikanti_2022_table4_layer_times"]:
        tp, samples, experiment = int(row["tp"]), int(row["micro_batch"]), row["experiment"]
        cluster = Cluster.named(CLUSTER)
        prices = Prices(cluster, Mesh((("tp", tp),)), Constants.of(cluster), SoftwareProfile.named("megatron-2022"))
        work = _of(shapes[row["model"]], tp, int(row["seq"]), "sequence" in experiment)
        layer = [block for block in work.blocks if block.is_layer][-1]
        forward = prices.part(layer.forward, samples)
        again = forward if "full" in experiment else prices.part(layer.core, samples) if "selective" in experiment else Seconds()
        gradients = prices.part(layer.input_gradient, samples), prices.part(layer.weight_gradient, samples)
        backward = sum((*gradients, again), Seconds()).total - prices.hidden_seconds(*gradients)
        for column, seconds in (("forward_ms", forward.total), ("backward_ms", backward)):
            where = {"model": row["model"], "experiment": experiment, "part": column.removesuffix("_ms")}
            yield Compared(where, 1e-3 * float(row[column]), seconds)


SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "auto", "ZB-2p": "auto"}
LIMITS = {"ZB-1p": 1, "ZB-2p": 2}


def zero_bubble(tables: Tables) -> Iterator[Case]:
    """Printed are samples a GPU and second. 1F1B-I has a layer a chunk, and no layer in the first and the last one."""
    shapes = {row["model"]: row for row in tables["zero_bubble_table3_settings"]}
    for row in tables["zero_bubble_table4"]:
        shape, gpus = shapes[row["model"]], int(row["p_gpus"])
        number, samples, schedule = int(row["m"]), int(row["micro_batch"]), row["schedule"]
        chunks = (int(shape["layers"]) + 2) // gpus if schedule == "1F1B-I" else 1
        step = step_of(
            _of(shape, 1, int(shape["seq"])),
            cluster=CLUSTER,
            mesh={"pp": gpus},
            global_batch=number * samples,
            microbatch=samples,
            schedule=SCHEDULES[schedule],
            num_chunks=chunks,
            live_limit=LIMITS[schedule] * gpus if schedule in LIMITS else None,
            profile="zero-bubble",
        )
        printed = number * samples / (gpus * float(row["samples_per_gpu_per_s"]))
        yield Case({"model": row["model"], "schedule": schedule, "microbatches": number}, printed, step)
