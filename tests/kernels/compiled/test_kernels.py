"""Every kernel in its default configurations, on every target: no spills, shared memory that fits, matrix instructions, as recorded.

What the kernels compile to is recorded per Triton version in baselines/, since versions differ. To record anew:

    RECORD_KERNELS=1 COMPILE_KERNELS=1 .venv/bin/python -m pytest tests/kernels/compiled
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from tests.kernels.compiled.cases import CASES, MATMUL_KERNELS
from tests.kernels.compiled.compiling import SHARED_LIMIT_BYTES, TARGETS, compile_for, launches_of

BASELINE = Path(__file__).parent / "baselines" / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.json"
RECORDING = os.environ.get("RECORD_KERNELS") == "1"
# What a kernel compiles to may move this much before somebody should look.
REGISTERS_SLACK = 8


@pytest.fixture(scope="module")
def baseline() -> Iterator[dict[str, dict[str, int]]]:
    known = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    yield known
    if RECORDING:
        BASELINE.parent.mkdir(exist_ok=True)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
        BASELINE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_compiles_within_limits(name: str, target: str, baseline: dict[str, dict[str, int]]) -> None:
    case = CASES[name]
    launches = launches_of(case.modules, case.call, target)
    assert launches
    for launch in launches:
        compiled = compile_for(launch, target)
        where = f"{name} / {launch.kernel.__name__} / {target}"
        found = {
            "registers": compiled.registers,
            "shared_bytes": compiled.shared_bytes,
            "matrix_instructions": compiled.matrix_instructions(target, older=case.older_matrix_instructions),
        }
        assert compiled.spill_bytes == 0, f"{where} spills {compiled.spill_bytes} bytes; {found}"
        assert compiled.shared_bytes <= SHARED_LIMIT_BYTES[target], f"{where} wants {compiled.shared_bytes} bytes of shared memory"
        assert bool(found["matrix_instructions"]) == (launch.kernel.__name__ in MATMUL_KERNELS), f"{where}: {found}"
        if RECORDING:
            baseline[where] = found
        elif BASELINE.exists():
            compare(where, found, baseline)


def compare(where: str, found: dict[str, int], baseline: dict[str, dict[str, int]]) -> None:
    assert where in baseline, f"{where} is not in {BASELINE.name}; record it: RECORD_KERNELS=1"
    before = baseline[where]
    same = found["shared_bytes"] == before["shared_bytes"] and found["matrix_instructions"] == before["matrix_instructions"]
    close = abs(found["registers"] - before["registers"]) <= REGISTERS_SLACK
    assert same and close, f"{where} was {before} and is {found}; if that is meant, record it: RECORD_KERNELS=1"


def test_this_version_has_a_baseline() -> None:
    if RECORDING or not BASELINE.exists():
        pytest.skip(f"nothing is recorded (or all of it just now) for Triton {triton.__version__}: {BASELINE.name}")
    recorded = {where.split(" / ")[0] for where in json.loads(BASELINE.read_text(encoding="utf-8"))}
    assert recorded == set(CASES), "recorded and launched configurations differ; record them: RECORD_KERNELS=1"
