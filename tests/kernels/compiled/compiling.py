"""Records the launches of our kernels on tensors without storage, and compiles them for a GPU that need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autopar.kernels.gpu import attention_tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What one program may have: of CUDA devices what a launch can opt in to, of AMD's the LDS of a compute unit.
SHARED_LIMIT_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
MATRIX_INSTRUCTION = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma", "gfx942": r"v_mfma_"}
GENERATION = {"sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "gfx942": "amd"}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments in order, its constants and its options."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    """What a launch becomes on one target. AMD's assembly gives spills and registers of vectors; shared memory is the launch's."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    assembly: str

    def matrix_instructions(self, target: str, older: bool = False) -> int:
        """How many the assembly has; `older` ones, that any target of the maker has, count as well if asked for."""
        pattern = f"{MATRIX_INSTRUCTION[target]}|mma\\.sync" if older else MATRIX_INSTRUCTION[target]
        return len(re.findall(pattern, self.assembly))


@contextmanager
def recording(modules: Iterable[ModuleType], target: str) -> Iterator[list[Launch]]:
    """While this is entered, launches of `modules` are noted, not run, as on `target`: functions then take tensors on "meta"."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        constants = {name: value for name, value in options.items() if name not in _OPTIONS}
        launches.append(Launch(kernel, arguments, constants, {name: options[name] for name in _OPTIONS if name in options}))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "launch", note))
        stack.enter_context(mock.patch.object(attention_tiles, "generation", lambda _: GENERATION[target]))
        stack.enter_context(mock.patch.object(torch.version, "hip", "any" if GENERATION[target] == "amd" else None))
        yield launches


def launches_of(modules: Iterable[ModuleType], call: Callable[[], object], target: str) -> list[Launch]:
    with recording(modules, target) as launches:
        call()
    return launches


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile as Triton's launcher would: 1 is a constant, what 16 divides is known to be so."""
    names = launch.kernel.arg_names
    signature, constants, attributes = dict[str, str](), dict[str, Any](launch.constants), dict[tuple[int, ...], Any]()
    for index, name in enumerate(names):
        value = launch.arguments[index] if index < len(launch.arguments) else launch.constants[name]
        kind = "constexpr" if name in launch.constants or _is_constant(value) else _type_of(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    # What Triton does where nobody says, until 3.10, with a warning.
    options = launch.options | {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    read = _read_amd if target.startswith("gfx") else _read_nvidia
    return read(compiled)


def _is_constant(value: Any) -> bool:
    return value is None or (type(value) is int and value == 1)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def _read_nvidia(compiled: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    spills = found["STACK"] + found["LOCAL"]
    return Compiled(found["REG"], spills, compiled.metadata.shared, compiled.asm["ptx"])


def _read_amd(compiled: Any) -> Compiled:
    assembly = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert match is not None, name
        return int(match[1])

    return Compiled(number("vgpr_count"), number("private_segment_fixed_size"), compiled.metadata.shared, assembly)
