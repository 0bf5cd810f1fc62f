"""Whether a call's arguments are those that forward takes, asked before anything is compiled for it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from autopar.errors import ArgumentError
from autopar.runtime._torch import has_forward_pre_hooks

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `ArgumentError`, a `TypeError` as Python's, naming the arguments that are missing or unknown.

    A forward that takes whatever it is given (a decorator does) is asked when it is captured.
    """
    if has_forward_pre_hooks(model):  # they may pass on other arguments
        return
    try:
        signature = inspect.signature(model.forward, follow_wrapped=False)
    except ValueError:  # written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        what = "; ".join(_problems(signature, args, kwargs)) or str(error)
        takes = ", ".join(str(each) if each.kind not in _NAMED else name for name, each in signature.parameters.items())
        raise ArgumentError(f"the call does not fit {type(model).__name__}.forward({takes}): {what}") from None


def _problems(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    parameters = signature.parameters
    problems: list[str] = []
    try:
        given = set(signature.bind_partial(*args).arguments)
    except TypeError:
        count = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters.values())
        return [f"{len(args)} positional arguments are given, it takes at most {count}"]
    twice = sorted(given & set(kwargs))
    missing = [
        name
        for name, each in parameters.items()
        if each.kind in (*_NAMED, each.POSITIONAL_ONLY) and each.default is each.empty and name not in given | set(kwargs)
    ]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters or parameters[name].kind not in _NAMED]
    if missing:
        problems.append(f"missing {_quoted(missing)}")
    if twice:
        problems.append(f"{_quoted(twice)} given by position and by name")
    for name in unknown:
        close = difflib.get_close_matches(name, [each for each in parameters if each not in kwargs], 1)
        problems.append(f"unknown {name!r}" + (f" (is {close[0]!r} meant?)" if close else ""))
    return problems


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
