"""Undoes what forward assigns to its modules while it is traced (a cached mask, a counter): the model would keep tensors of the trace."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.frontend.held_objects import OF_MODULES, HeldObjects
from autopar.frontend.module_hooks import FORWARD_HOOK_FLAGS, FORWARD_HOOKS

_HOOKS = (*FORWARD_HOOKS, *FORWARD_HOOK_FLAGS)
# What torch keeps on each module.
_TORCHS = frozenset(vars(nn.Module()))


@contextmanager
def attributes_kept(model: nn.Module, but_hooks: bool = False) -> Generator[set[str]]:
    """Give back to `model` what it held before: attributes, and the dicts, lists and sets among them, which stay the same objects.

    Yields a set that has the paths of the attributes given back, once they are.

    With `but_hooks`, where the first forward installs hooks (transformers, to record router logits), the hooks stay and so do
    the flags that say so: export cannot follow their installation, but follows the hooks.
    """
    paths = [path for path, _ in model.named_modules()]
    modules = [(vars(module), dict(vars(module))) for module in model.modules()]
    containers = [value for _, kept in modules for value in kept.values() if type(value) in OF_MODULES]
    contents: list[tuple[Any, Any]] = [(container, copy.copy(container)) for container in containers]
    old = {id(container): content for container, content in contents}
    objects, written = HeldObjects(model), set[str]()
    try:
        yield written
    finally:
        for path, (attributes, kept) in zip(paths, modules, strict=True):
            written.update(f"{path}.{name}".lstrip(".") for name in _written(attributes, kept, old))
        written.update(objects.give_back())
        installed = [_installed(attributes, kept, old) for attributes, kept in modules] if but_hooks else []
        for container, content in [*modules, *contents]:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        if any(hooks for hooks, _ in installed):
            for (attributes, _), (hooks, flags) in zip(modules, installed, strict=True):
                attributes.update(flags)
                for name, added in hooks.items():
                    attributes[name].update(added)


def numbers_of(model: nn.Module) -> dict[str, float]:
    """The plain numbers and flags that modules hold as attributes, by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float))
    }


def tensors_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, ...]]:
    """The tensors that modules hold as attributes beside parameters and buffers, or in a list, tuple or dict that is one, by its path."""
    found = {
        f"{path}.{name}".lstrip("."): tuple(
            each for each in _values(value) if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)
        )
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCHS
    }
    return {path: tensors for path, tensors in found.items() if tensors}


def others(before: Mapping[str, tuple[torch.Tensor, ...]], after: Mapping[str, tuple[torch.Tensor, ...]]) -> set[str]:
    """The attributes, of either, that hold other tensors `after` than `before`: other objects, whatever their values are."""
    return {path for path in {**before, **after} if list(map(id, before.get(path, ()))) != list(map(id, after.get(path, ())))}


def num_hooks(model: nn.Module) -> int:
    return sum(len(vars(module)[name]) for module in model.modules() for name in _HOOKS)


def _written(attributes: dict[str, Any], before: dict[str, Any], old: dict[int, Any]) -> set[str]:
    """The names that hold another value than before, or a container of other contents than the `old` one of its id; hooks and what torch
    keeps apart are none.

    Nor are flags: a forward that has run once may be another one (a lazy initialisation), and is so for good.
    """
    found = {name for name in {**before, **attributes} if attributes.get(name, old) is not before.get(name, old)}
    found |= {name for name, value in before.items() if id(value) in old and _items(value) != _items(old[id(value)])}
    return {name for name in found if not isinstance(before.get(name), bool)} - _TORCHS


def _values(value: Any) -> Collection[Any]:
    """What a container holds; of anything else itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _items(container: Any) -> list[int]:
    """The identities of what it holds, keys as well."""
    values = container.values() if isinstance(container, dict) else ()
    return [*map(id, container), *map(id, values)]


def _installed(
    attributes: dict[str, Any], before: dict[str, Any], old: dict[int, Any]
) -> tuple[dict[str, dict[int, Any]], dict[str, bool]]:
    """The hooks that a module got, by the attribute that has them, and its new or changed flags; `old` are contents by a container's id."""
    held = {name: attributes[name] for name in _HOOKS if name in attributes}
    hooks = {name: {key: hook for key, hook in hooks.items() if key not in old.get(id(hooks), {})} for name, hooks in held.items()}
    flags = {name: value for name, value in attributes.items() if isinstance(value, bool) and before.get(name) is not value}
    return {name: added for name, added in hooks.items() if added}, flags
