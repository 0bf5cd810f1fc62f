"""Which lines of the model a fragment was computing when it failed: an id outside of its table is found by them, not by a kernel's text."""

from __future__ import annotations

import re
import traceback
from types import CodeType

from torch.fx import GraphModule, Node

from autopar.ir.keys import SOURCE

# So many lines are named.
_SHOWN = 4
# Parts of the names of ops that read or write where numbers say.
_INDEXING = ("embedding", "gather", "index", "scatter", "take")


def note_of_line(module: GraphModule, code: CodeType, error: BaseException) -> str:
    """Of what failed in `code`, that of `module`: the op and its line; empty where another's code failed, or that has no line."""
    number = next((number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code is code), None)
    lines = module.code.splitlines()
    found = re.match(r"\s*(\w+)\b.*? = ", lines[number - 1]) if number is not None and number <= len(lines) else None
    node = next((node for node in module.graph.nodes if found is not None and node.name == found[1]), None)
    place = None if node is None else SOURCE.get(node)
    if found is None or place is None:
        return ""
    return f"computing {found[1]}{place.module and f' of {place.module}'}, where: {place.at}"


def note_of_fragment(name: str, module: GraphModule, error: BaseException) -> str:
    """Of compiled code, which is of one piece: the lines in it; those that index where the `error` speaks of an index."""
    nodes: list[Node] = [node for node in module.graph.nodes if node.op == "call_function"]
    if "index" in str(error):
        nodes = [node for node in nodes if any(part in str(node.target) for part in _INDEXING)] or nodes
    places = dict.fromkeys(place.at for node in nodes if (place := SOURCE.get(node)) is not None)
    more = f"\n  and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return f"in fragment {name}, which computes:\n  " + "\n  ".join([*places][:_SHOWN]) + more if places else f"in fragment {name}"
