"""The main job on one GPU: an NCCL world of one, three backends, losses compared with plain PyTorch's on the CPU.

    python benchmarks/gpu_smoke.py --out gpu_smoke.json

Exits with 0 when every loss is within 1e-3 of the CPU's, with 1 when not, with 2 where there is no GPU.
What needs several GPUs (NCCL refuses two ranks on one) is untested here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
BACKENDS = ("eager", "aot_eager", "inductor")
TOLERANCE = 1e-3  # nats, absolute, the largest over all steps
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]


def run_job(command: list[str], num_steps: int, log: Path) -> list[dict[str, float]]:
    """Run the main job; its log, one entry a step: step, loss (nats), seconds. Raises `RuntimeError` with its output when it fails."""
    # TF32 would part from the CPU; the flag is PyTorch's default and is set in case the machine's image changes it.
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*command, "--steps", str(num_steps), "--losses", str(log), "--sample", "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def compare(steps: list[dict[str, float]], reference: list[dict[str, float]], tokens_per_step: int) -> dict[str, Any]:
    differences = [abs(step["loss"] - expected["loss"]) for step, expected in zip(steps, reference, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    seconds = statistics.median(step["seconds"] for step in steps[len(steps) // 5 :])
    return {
        "equal": differences[worst] <= TOLERANCE,
        "largest_loss_difference": differences[worst],
        "at_step": worst,
        "last_loss": steps[-1]["loss"],
        "first_step_seconds": steps[0]["seconds"],
        "median_step_seconds": seconds,
        "tokens_per_second": tokens_per_step / seconds,
    }


def measure(num_steps: int, backends: list[str], folder: Path) -> dict[str, Any]:
    """Plain PyTorch on the CPU, plain PyTorch on the GPU, then autopar on an NCCL world of one under each backend."""
    plain = [sys.executable, str(EXAMPLE), "--single"]
    jobs = {"plain PyTorch": [*plain, "--device", "cuda"]}
    for backend in backends:
        jobs[backend] = [*LAUNCHER, str(EXAMPLE), "--mesh", "dp=1,tp=1", "--device", "cuda", "--backend", backend]
    tokens_per_step = 16 * 128  # the example's defaults
    reference = run_job([*plain, "--device", "cpu"], num_steps, folder / "cpu.jsonl")
    results: dict[str, Any] = {}
    for number, (name, command) in enumerate(jobs.items()):
        try:
            results[name] = compare(run_job(command, num_steps, folder / f"{number}.jsonl"), reference, tokens_per_step)
        except RuntimeError as error:  # one backend that fails must not hide the others
            results[name] = {"equal": False, "error": str(error)}
        print(f"{name:14} {json.dumps(results[name])[:400]}", file=sys.stderr, flush=True)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": num_steps,
        "tolerance": TOLERANCE,
        "cpu_last_loss": reference[-1]["loss"],
        "results": results,
        "equal": all(result["equal"] for result in results.values()),
        "untested": "meshes of more than one rank need several GPUs",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here; this benchmark needs one GPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options.steps, options.backends, Path(folder))
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
