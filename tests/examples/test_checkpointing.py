"""The main job stops at a signal, saves, and goes on on another mesh as if it had not stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpointing import Checkpoints
from options import parse
from text import Windows

from tests.support.checkpoints import all_of, parallel_on
from tests.support.models.trained import LENGTH, SAMPLES, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """A loop as the example's, of the small GPT."""

    def __init__(self, folder: Path, axes: dict[str, int], *flags: str) -> None:
        text = (torch.arange(500) ** 2 % VOCABULARY).to(torch.uint8)
        self.options = parse("a model", ["--save", str(folder), "--steps", "6", *flags])
        self.parallel, self.windows = parallel_on(axes), Windows(text, SAMPLES, LENGTH + 1, seed=0)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.parallel.optimizer, lambda update: 0.9**update)
        self.schedule = schedule
        self.checkpoints = Checkpoints(self.options, self.parallel, self.windows, schedule)
        self.first = self.checkpoints.resume()

    def go(self, at: Callable[[int], None] = lambda _: None) -> str:
        for number in range(self.first, self.options.steps):
            windows = self.windows.draw()
            self.parallel.train_step(tokens=windows[:, :-1].contiguous(), labels=windows[:, 1:].contiguous())
            self.schedule.step()
            at(number)
            if heard := self.checkpoints.after(number + 1, True):
                break
        self.checkpoints.end()
        return heard


def sigterm_at(number: int) -> None:
    if number == 2:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.xdist_group("gloo")
def test_a_run_that_is_stopped_goes_on_on_another_mesh(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    straight = Run(tmp_path / "straight", {"dp": 2}, "--save-every", "4")
    assert straight.go() == "" and sorted(each.name for each in (tmp_path / "straight").glob("0*")) == ["00000001", "00000002"]
    assert Run(tmp_path / "run", {"dp": 2}, "--resume").go(sigterm_at) == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = Run(tmp_path / "run", {"tp": 2}, "--resume")
    assert resumed.first == 3 and resumed.go() == ""
    assert resumed.parallel.optimizer.param_groups[0]["lr"] == straight.parallel.optimizer.param_groups[0]["lr"]
    wanted, found = all_of(straight.parallel), all_of(resumed.parallel)
    assert max(float((wanted[name] - found[name]).abs().max()) for name in wanted) <= 1e-12


SMALL = [
    "--layers",
    "2",
    "--width",
    "64",
    "--heads",
    "4",
    "--length",
    "32",
    "--batch",
    "8",
    "--backend",
    "eager",
    "--sample",
    "0",
    "--steps",
    "40",
]


class Job:
    """`examples/train_gpt.py` with these flags, under torchrun for so many processes."""

    def __init__(self, folder: Path, *flags: str, processes: int = 4) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
        self.losses = folder / "losses"
        command = [sys.executable, *launcher, "examples/train_gpt.py", *SMALL, *flags, "--losses", str(self.losses)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._log = folder.joinpath("printed").open("a")
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def until(self, is_there: Callable[[], bool]) -> None:
        """Wait for that, or for the end of the process."""
        begun = time.monotonic()
        while not is_there() and self._process.poll() is None and time.monotonic() - begun < 500:
            time.sleep(0.1)
        assert is_there()

    def kill(self) -> None:
        """It and its ranks, which torchrun puts into sessions of their own."""
        for each in (self._process.pid, *_descendants(self._process.pid)):
            os.kill(each, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """By SIGTERM to torchrun, which hands it on; its exit code."""
        self._process.terminate()
        return self._process.wait(120)

    def wait(self) -> int:
        return self._process.wait(500)

    def lines(self) -> int:
        return len(self.losses.read_text().splitlines()) if self.losses.exists() else 0

    def found(self) -> dict[int, float]:
        """The loss of each step; of those that were run twice, after a kill, the later one."""
        return {each["step"]: each["loss"] for each in map(json.loads, self.losses.read_text().splitlines())}


def _descendants(process: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [each for child in children for each in (child, *_descendants(child))]


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_the_main_job_goes_on_through_meshes_and_kills(tmp_path: Path) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    straight.mkdir()
    one = Job(straight, "--mesh", "dp=2", processes=0)
    assert one.wait() == 0
    flags = ("--save", str(folder), "--save-every", "10", "--resume")
    first = Job(tmp_path, "--mesh", "dp=4", *flags)
    first.until(lambda: (folder / "00000002").exists())
    first.kill()
    done = first.lines()
    second = Job(tmp_path, "--mesh", "dp=2,tp=2", "--zero", "3", *flags)
    second.until(lambda: second.lines() >= done + 4)
    second.stop()
    assert "ended by SIGTERM after step" in " ".join((tmp_path / "printed").read_text().split())
    third = Job(tmp_path, "--mesh", "pp=2,dp=2", "--zero", "1", *flags)
    assert third.wait() == 0
    wanted, found = one.found(), third.found()
    assert found.keys() == wanted.keys() == set(range(40))
    worst = max(abs(found[step] - wanted[step]) for step in wanted)
    print(f"largest difference of a loss: {worst:.2e}")
    assert worst <= 1e-4
