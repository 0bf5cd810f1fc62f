"""A compile with `cache=`, in two processes one after the other: CPU seconds of the first and of the second, and that both are one program.

    python -m benchmarks.second_compile                                  GPT-2-small, 12 layers, on virtual dp2 × tp2
    python -m benchmarks.second_compile --layers 2 --json second_compile.json

The compile alone, from `autopar.compile` to a program that can run; what comes before it, imports and the model's initialisation, is the
same in both. The third row is a compile without a cache, in a process of its own: what the first pays for keeping its capture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import autopar
from autopar.ir.printing import print_program
from benchmarks.compile_time import batch_of, gpt2
from benchmarks.reporting import print_table, write_json


def measured(num_layers: int, folder: str | None, backend: str) -> dict[str, Any]:
    """One compile, in this process."""
    model, batch = gpt2(num_layers), batch_of(4, 256)
    start, start_cpu = time.perf_counter(), time.process_time()
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2, tp=2), example_inputs=batch, backend=backend, cache=folder)
    cpu, seconds = time.process_time() - start_cpu, time.perf_counter() - start
    compiled = parallel.compiled
    programs = (print_program(each) for each in (compiled.forward, compiled.program, compiled.local))
    text = "\n".join((*map(str, compiled.schedules), *programs))
    return {
        "cpu s": cpu,
        "s": seconds,
        "read": bool(compiled.read_from),
        "fingerprint": compiled.fingerprint,
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "plan": hashlib.sha256(parallel.plan.to_json().encode()).hexdigest(),
        "steps": {step.name: step.seconds for step in compiled.steps if step.seconds > 0.05},
    }


def in_a_process(options: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.second_compile", "--once", "--layers", str(options.layers), "--backend", options.backend]
    output = subprocess.run([*command, *(("--folder", folder) if folder else ())], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--once", action="store_true", help="compile in this process, and print one line")
    parser.add_argument("--folder")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measured(options.layers, options.folder, options.backend)))
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = in_a_process(options, folder), in_a_process(options, folder)
    without = in_a_process(options, None)
    assert second["read"] and not first["read"], "the second did not read what the first kept"
    for name in ("fingerprint", "text", "plan"):
        assert first[name] == second[name] == without[name], f"the compiles differ: {name}"
    rows = [
        {"compile": name, "cpu s": each["cpu s"], "of the first": f"{100 * each['cpu s'] / first['cpu s']:.0f} %", "s": each["s"]}
        for name, each in (("first", first), ("second", second), ("without a cache", without))
    ]
    title = f"GPT-2-small, {options.layers} layers, dp2 × tp2 virtual, {options.backend}: two processes, one folder"
    print_table(title, rows)
    print_table("the second, passes above 0.05 s", [{"pass": name, "s": seconds} for name, seconds in second["steps"].items()])
    write_json(options.json, {"title": title, "rows": rows})


if __name__ == "__main__":
    main()
