"""Takes back what forward writes of a trace into plain objects that modules hold: `self.memory.state = h`, `node.children.append(h)`.

Attributes of the modules themselves are given back in `attributes.py`, whatever was written. Of other objects nobody knows what they do
with what they hold, so only what holds tensors of the trace goes: they have no values, and cannot be copied.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar._torch import is_fake

logger = logging.getLogger("autopar")
# Those that are attributes of modules are given back in `attributes.py`; subclasses may refuse to be written to.
OF_MODULES = (dict, OrderedDict, defaultdict, list, set)
_CONTAINERS = (*OF_MODULES, deque)
# What is not looked into: modules are elsewhere, and the rest is no place to keep a tensor of one model.
_OPAQUE = (nn.Module, torch.Tensor, type, FunctionType, ModuleType)
_ATOMS = frozenset((int, float, str, bool, bytes, type(None), torch.Tensor, nn.Parameter))  # most of what is held: told first
_MOST_ITEMS, _MOST_PLACES = 2_000, 20_000


class HeldObjects:
    """The plain objects that modules hold, in attributes and containers, and what these had when this was made."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        self._known = {id(vars(module)) for _, module in modules}
        held = [(f"{path}.{name}".lstrip("."), value) for path, module in modules for name, value in vars(module).items()]
        places = list(_places(held, self._known))
        self._known |= {id(value) for _, value in held if type(value) in OF_MODULES}
        self._places = [(path, place, _copy(place)) for path, place in places if id(place) not in self._known]

    def give_back(self) -> list[str]:
        """Give what has come to hold tensors of a trace what it had before; the paths of such. Where that was a tensor, warn."""
        written, memories = list[str](), list[str]()
        for path, place, before in self._places:
            if isinstance(place, dict):
                names = [name for name, value in place.items() if value is not before.get(name) and self._has_fakes(value)]
                written += [_within(path, name) for name in names]
                memories += [_within(path, name) for name in names if isinstance(before.get(name), torch.Tensor)]
                for name in names:
                    if name in before:
                        place[name] = before[name]  # at its place, as the order of a dict may count
                    else:
                        del place[name]
            elif (now := list(map(id, place))) != list(map(id, before)) and self._has_fakes(place):
                written.append(path)
                memories += [path] if any(isinstance(each, torch.Tensor) and id(each) not in now for each in before) else []
                place.clear()
                place.update(before) if isinstance(place, set) else place.extend(before)
        if memories:
            logger.warning(
                "forward puts other tensors in the place of those that plain objects of the model hold, which the captured program leaves "
                "as they were: %s; keep each in a buffer and write it in place (self.memory.copy_(...) under torch.no_grad())",
                ", ".join(memories),
            )
        return written

    def _has_fakes(self, value: Any) -> bool:
        within = [place for _, place in _places([("", [value])], self._known)]
        return any(isinstance(each, torch.Tensor) and is_fake(each) for place in within for each in _values(place))


def _copy(place: Any) -> Any:
    return dict(place) if isinstance(place, dict) else list(place)


def _within(path: str, name: Any) -> str:
    """The path of an item: a key may be a module, of which a text is long."""
    return f"{path}.{name if isinstance(name, (str, int)) else type(name).__name__}"


def _places(values: Iterable[tuple[str, Any]], passed: Iterable[int]) -> Iterator[tuple[str, Any]]:
    """What can be written of these values, and of what they hold: containers, and the attributes of plain objects as a dict."""
    seen, left = set(passed), [(path, place) for path, value in values if (place := _place(value)) is not None]
    while left and len(seen) < _MOST_PLACES:
        path, place = left.pop()
        if id(place) in seen or len(place) > _MOST_ITEMS:
            continue
        seen.add(id(place))
        if not isinstance(place, tuple):
            yield path, place
        items = place.items() if isinstance(place, dict) else enumerate(place)
        left += [(_within(path, name), within) for name, each in items if (within := _place(each)) is not None]


def _place(value: Any) -> Any:
    """What can be looked into of a value, if anything; without a word to its class, which may answer for another object (a proxy)."""
    kind = type(value)
    if kind in _ATOMS:
        return None
    if kind in _CONTAINERS or issubclass(kind, tuple):
        return value
    if issubclass(kind, _OPAQUE):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _values(place: Any) -> Iterable[Any]:
    for each in place.values() if isinstance(place, dict) else place:
        yield from _values(each) if issubclass(type(each), tuple) else (each,)
