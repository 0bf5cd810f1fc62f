"""What a user calls the leaves of a call's arguments."""

from __future__ import annotations

from typing import Any

from autopar._torch import pytree


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Of each leaf how the user would name it: `args[0]`, `input_ids`, `batch['mask']`."""
    return [_name(path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]


def _name(path: tuple[Any, ...]) -> str:
    if path[0].idx == 0:
        return "args" + pytree.keystr(path[1:])
    return f"{path[1].key}{pytree.keystr(path[2:])}"
