"""The flight recorder on gloo ranks, one of which is stopped, then killed, at random moments.

python test_recorder.py RANK FOLDER is one of the ranks.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
import autopar.runtime.execute.recorder
from autopar.errors import PeerError
from autopar.ir.instructions import Pause
from autopar.ir.mesh import Mesh
from autopar.reports.flight_recorder import SILENT_SECONDS
from autopar.runtime.execute.call import Call
from autopar.runtime.execute.process_groups import naming
from autopar.runtime.execute.recorder import HEARTBEAT_SECONDS, FlightRecorder
from tests.support.schedules import schedule_of

VICTIM = 1
# What one instruction may take to be recorded, on a machine that does other things.
MOST_SECONDS = 5e-6


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


# ---- the ranks


def training(batch: torch.Tensor) -> autopar.ParallelModule:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return autopar.compile(Net(), mesh, example_inputs=(batch,), backend="eager", optimizer=torch.optim.SGD, zero=3, timeout=60)


def train_for_ever(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    batch = torch.randn(8, 64)
    parallel = training(batch)
    if rank == VICTIM:
        tell_what_is_true(folder)
    while True:
        parallel.train_step(batch)
        (folder / f"ready{rank}").touch()


def trains_while_one_is_stopped(folder: str) -> tuple[str, bool]:
    """Rank 0 stops the victim at some moment, reads the recorder, and lets it go on: what it read, and whether that is true."""
    batch, recorder = torch.randn(8, 64), Path(os.environ["AUTOPAR_RECORDER"])
    parallel, found = training(batch), list[tuple[str, bool]]()
    parallel.train_step(batch)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    run = tell_what_is_true(Path(folder)) if dist.get_rank() == VICTIM else Call._run

    def stop_and_read() -> None:
        time.sleep(0.1 + 0.1 * random.random())
        os.kill(pids[VICTIM], signal.SIGSTOP)
        time.sleep(SILENT_SECONDS + HEARTBEAT_SECONDS + 0.5)
        read = autopar.read_recorder(recorder)
        found.append((str(read), read.awaited == (VICTIM,) and is_as_told(Path(folder), read)))
        os.kill(pids[VICTIM], signal.SIGCONT)

    thread = threading.Thread(target=stop_and_read)
    if dist.get_rank() == 0:
        thread.start()
    is_over = torch.zeros(1)
    while not is_over:
        parallel.train_step(batch)
        is_over.fill_(len(found))
        dist.broadcast(is_over, 0)
    Call._run = run
    return found[0] if found else ("", True)


def tell_what_is_true(folder: Path) -> Callable[..., None]:
    """Write each instruction, and whether it is over, by another way than the recorder's: 1 + 2 · number + is over; 0 outside of calls.

    Returns what was there before."""
    with (folder / "truth").open("wb+") as file:
        file.truncate(8)
        truth = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    run = Call._run

    def watched(call: Call, ends: Mapping[int, int] | None = None) -> None:
        def watch(number: int, is_over: bool) -> None:
            truth[0] = 1 + 2 * number + is_over

        for state in call.states.values():
            state.watch = watch
        run(call, ends)
        truth[0] = truth[0] if ends else 0  # it waits for the others' word within the call

    Call._run = watched
    return run


# ---- the tests


def start(folder: Path) -> list[subprocess.Popen[str]]:
    environment = os.environ | {
        "AUTOPAR_RECORDER": str(folder / "recorder"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 120
    while not all((folder / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and all(each.poll() is None for each in ranks), "the ranks did not start"
        time.sleep(0.1)
    return ranks


def is_as_told(folder: Path, found: autopar.FlightRecord) -> bool:
    """Whether the recorder has the victim where it told to be. It tells a moment later that an instruction began, or the call ended."""
    truth = int.from_bytes((folder / "truth").read_bytes(), "little")
    last, program = found.by_rank[VICTIM].last, found.by_rank[VICTIM].program
    assert last is not None and program is not None
    if isinstance(found.instruction(VICTIM), Pause):  # which nobody tells of
        return truth in (0, 2 * last.number)
    if truth == 0 or last.number == len(program.instructions):
        return found.instruction(VICTIM) is None or last.number == 0 or truth == 2 * len(program.instructions)
    number, is_over = divmod(truth - 1, 2)
    return last.number in ((number, number + 1) if is_over else (number,))


def stop_at_random_moments(folder: Path, number: int) -> None:
    ranks, generator = start(folder), random.Random(0)
    try:
        for moment in range(number):
            time.sleep(0.05 + generator.random())
            ranks[VICTIM].send_signal(signal.SIGSTOP)
            time.sleep(SILENT_SECONDS + HEARTBEAT_SECONDS + 0.5)
            found = autopar.read_recorder(folder / "recorder")
            assert found.awaited == (VICTIM,), f"moment {moment}: {found}"
            assert is_as_told(folder, found), f"moment {moment}: {found}"
            ranks[VICTIM].send_signal(signal.SIGCONT)
        ranks[VICTIM].kill()
        output = ranks[1 - VICTIM].communicate(timeout=120)[0]
        (where,) = set(re.findall(r"print\(autopar\.read_recorder\('(.*)'\)\)", output)) or ("",)
        assert where == str(folder / "recorder"), output
        assert autopar.read_recorder(where).by_rank[1 - VICTIM].is_from_peer
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def test_a_rank_that_is_stopped_is_named_with_its_instruction(tmp_path: Path, gloo_ranks: Any) -> None:
    text, is_true = gloo_ranks.run(trains_while_one_is_stopped, str(tmp_path))[0]
    assert is_true, text
    assert f"everybody waits for rank {VICTIM}\n" in text and "no sign of life since" in text


def test_an_error_of_a_peer_says_where_the_records_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder(tmp_path, 0, 2, is_temporary=False)
    monkeypatch.setattr(autopar.runtime.execute.recorder, "_recorders", [recorder])
    with pytest.raises(PeerError) as caught, naming(0, (1,), "a comparison"):
        raise RuntimeError("Connection closed by peer")
    assert caught.value.__notes__ == [recorder.where]
    (found,) = autopar.read_recorder(tmp_path).ranks
    assert found.is_from_peer and "got no answer from rank 1 for a comparison" in found.error


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_at_twenty_moments_and_when_it_is_killed(tmp_path: Path) -> None:
    stop_at_random_moments(tmp_path, 20)


def test_recording_takes_no_time_worth_measuring(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, 0, 1, is_temporary=False)
    record = recorder.call(schedule_of("RUN f (a) -> (b)"), Mesh((("dp", 1),)), 0, (0,))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for number in range(2000):
            record(number)
        seconds.append((time.perf_counter() - begin) / 2000)
    assert min(seconds) < MOST_SECONDS


if __name__ == "__main__":
    train_for_ever(int(sys.argv[1]), Path(sys.argv[2]))


def test_a_rank_leaves_without_a_word_where_another_has_removed_the_folder(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "records", 0, 2, is_temporary=True)
    shutil.rmtree(tmp_path / "records")
    recorder._leave(os.getpid())
    assert not (tmp_path / "records").exists()
