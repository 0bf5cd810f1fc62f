"""The code that runs, as text: which lines are on the stack, and what their functions are compiled to."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from autopar.ir.source import is_torchs

_PACKAGE = Path(__file__).parent.parent
# The package, what its links to the folders beside it lead to, and Python's own library.
_OWN = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *((_PACKAGE / name).resolve() for name in ("passes", "runtime", "kernels"))))
_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Stack:
    """Numbers the lines of code that are seen on the stack up to `end`; `lines` say what each number is."""

    def __init__(self, end: CodeType) -> None:
        self.lines: list[str] = []
        self._numbers: dict[tuple[CodeType, int], str] = {}
        self._files: dict[str, str] = {}
        self._end = end

    def now(self) -> str:
        """The lines that the caller was called by, innermost first, of code that is neither torch's, Python's nor ours."""
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._end:
            if not _is_versioned(frame.f_code.co_filename):
                found.append(self._number(frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return " ".join(found)

    def _number(self, code: CodeType, line: int) -> str:
        if (code, line) not in self._numbers:
            self._numbers[code, line] = f"@{len(self.lines)}"
            file = code.co_filename
            if file not in self._files:
                self._files[file] = _content(file)
            self.lines.append(f"{file}:{line} {code.co_qualname} {_digest(code)} {self._files[file]}")
        return self._numbers[code, line]


@cache
def _is_versioned(file: str) -> bool:
    """Whether code of a file is known by the version of what it belongs to."""
    is_pythons = file.startswith("<frozen ") or (file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED))
    return is_pythons or is_torchs(file) or file.startswith(_OWN)


@cache
def _digest(code: CodeType) -> str:
    """Of what a function is compiled to: a file may have been written anew since it was imported."""
    return hashlib.sha256(_words(code).encode()).hexdigest()[:32]


def _words(code: CodeType) -> str:
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_name
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return f"{shape}{names}{code.co_code.hex()}{code.co_exceptiontable.hex()}{[_constant(each) for each in code.co_consts]}"


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _words(value)
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_constant, value))}"
    return f"({', '.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def _content(file: str) -> str:
    """Of a file as it is now, whose lines reports show."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:32]
    except OSError:  # what was typed, or made by a library
        return "-"
