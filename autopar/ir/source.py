"""Where each node comes from: the user's source line and module path, out of torch's trace records."""

from __future__ import annotations

import os
import re
import sysconfig
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.keys import SOURCE, Source

# The attribute under which capture wraps the user's model: what paths of modules begin with in torch's records.
WRAPPED = "model."
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# The package itself, and what its links to the folders beside it lead to.
_OWN = tuple(
    folder + os.sep
    for here in (os.path.dirname(os.path.dirname(os.path.abspath(__file__))),)
    for folder in (here, *(os.path.realpath(os.path.join(here, name)) for name in ("passes", "runtime", "kernels")))
)


def set_sources(graph: Graph, prefix: str = "") -> None:
    """Set SOURCE on every call; `prefix` is what capture put before the user's module paths.

    A backward call has the record of its forward partner. The adds by which autograd accumulates a gradient have a
    misleading record of some other call, so they take the source of the gradient that they add last.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            calls = [operand for operand in node.all_input_nodes if operand in SOURCE]
            SOURCE[node] = SOURCE[calls[-1]] if calls and node.meta.get("is_gradient_acc") else source_of(node, prefix)


def source_of(node: Node, prefix: str = "") -> Source:
    """The innermost line outside of torch and of this package, and the innermost module."""
    frames = user_frames(node.meta.get("stack_trace") or "")
    place = frames[-1] if frames else Source()
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return replace(place, module=_module_path(stack, prefix))


def module_calls(node: Node) -> dict[str, str]:
    """The modules that `node` is computed in, outermost first, each with a name for which of its calls this is.

    A module that runs twice has two calls.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        module = SOURCE[node].module if node in SOURCE else ""
        return {module: ""} if module else {}
    paths = {path_of(str(entry[0]), WRAPPED): str(key).partition("@")[2] for key, entry in stack.items()}
    return {path: call for path, call in paths.items() if path}


def user_frames(text: str) -> list[Source]:
    """The frames outside of torch and of this package in a printed stack, outermost first."""
    frames = [Source(frame["file"], int(frame["line"]), frame["code"].strip()) for frame in _FRAME.finditer(text)]
    return [frame for frame in frames if not is_torchs(frame.file) and not frame.file.startswith(_OWN)]


@cache
def is_library(file: str) -> bool:
    """Whether a file is Python's own or was installed, into whatever folder (`pip install --target`)."""
    return file.startswith(_LIBRARIES) or "site-packages" in file or _is_recorded(Path(file))


def _is_recorded(file: Path) -> bool:
    """Whether an installer notes the file among what it has put into one of the folders around it."""
    return any(file.relative_to(folder).as_posix() in _recorded(folder) for folder in file.parents)


@cache
def _recorded(folder: Path) -> frozenset[str]:
    """What installers have put into a folder: read once, as folders hold many files and many records."""
    texts = (record.read_text(encoding="utf-8", errors="replace") for record in folder.glob("*.dist-info/RECORD"))
    return frozenset(line.rpartition(",")[0].rpartition(",")[0] for text in texts for line in text.splitlines())


def is_torchs(file: str) -> bool:
    return file.startswith(_TORCH)


def _module_path(stack: Any, prefix: str) -> str:
    """The innermost module's path: `L['self'].model.h[0].mlp` → `h.0.mlp`."""
    if not stack:
        return ""
    return path_of(str(list(stack.values())[-1][0]), prefix)


@cache
def path_of(raw: str, prefix: str) -> str:
    """The module's path in Dynamo's spelling of where it is found, without `prefix`."""
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", raw)
    path = re.sub(r"_modules\.", "", path)
    path = path.split("L.self", 1)[-1].strip(".").removeprefix("_export_root").strip(".")  # the root of the export, inside regions, too
    return path.removeprefix(prefix.rstrip(".")).strip(".")
