"""What a capture executes of other people's code: by these functions, and what they read, a later process knows that its capture would do
the same.

The forward runs once on fake tensors, watched by Python's profiler, and Dynamo tells what it traces. Functions of torch, of the standard
library and of ours are left out, since versions and files say what they are. What reads something that no description has (a file, the
clock, a random number) is a reason not to store the capture.
"""

from __future__ import annotations

import datetime
import io
import os
import random
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

from autopar._torch_cache import traced_codes
from autopar.ir.source import is_library, is_ours, is_torchs

# What a code object is known by: its file, qualified name and first line.
CodeName = tuple[str, str, int]

_FILES = {io.open, os.open, os.listdir, os.scandir, os.read, os.stat, os.lstat, os.access, os.readlink}
_PROCESS = {
    os.urandom, os.getcwd, os.getpid, os.uname, os.cpu_count, time.time, time.time_ns, time.perf_counter, time.monotonic,
    time.process_time, time.localtime, time.gmtime, input, id, hash,
}  # fmt: skip
# Modules through which a process speaks with others.
_OUTSIDE = frozenset(("_socket", "_sqlite3", "mmap", "_posixsubprocess", "_ctypes", "_multiprocessing", "numpy.random"))
# Of the standard library, what reads files for messages and imports, of which no value comes into a forward.
_READERS = ("linecache.py", "tokenize.py", "traceback.py", "inspect.py", "warnings.py", "logging/__init__.py", "importlib/", "zipimport")
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_WHOLE_ENVIRONMENT = tuple(getattr(type(os.environ), name).__code__ for name in ("__iter__", "__len__", "copy"))
_ASKING = ("platform.py", "uuid.py", "random.py", "tempfile.py", "datetime.py", "socket.py", "subprocess.py", "getpass.py")
_EXTENSIONS = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "builtins", ""}
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def name_of(code: CodeType) -> CodeName:
    return code.co_filename, code.co_qualname, code.co_firstlineno


@cache
def is_platform(file: str) -> bool:
    """Whether a file is torch's, ours, or of Python itself: versions say what is in it."""
    is_pythons = file.startswith("<frozen") or (is_library(file) and "site-packages" not in file)
    return is_pythons or is_torchs(file) or is_ours(file) or file.endswith("/site-packages/typing_extensions.py")


@dataclass
class Recorded:
    """`codes` that were executed or traced, and those of the `platform` that have closures, in which functions of the user may be; names
    read of the environment, with what they were; reasons not to store what came of it."""

    codes: set[CodeType] = field(default_factory=set[CodeType])
    platform: set[CodeType] = field(default_factory=set[CodeType])
    environment: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    problems: list[str] = field(default_factory=list[str])

    @property
    def names(self) -> frozenset[CodeName]:
        return frozenset(map(name_of, self.codes))

    @property
    def all_names(self) -> frozenset[CodeName]:
        return frozenset(map(name_of, self.codes | self.platform))

    def add(self, code: CodeType) -> None:
        if code.co_filename == "<string>" and code.co_names == ("_tuple_new",):
            return  # by which every namedtuple makes its objects
        if not is_platform(code.co_filename):
            self.codes.add(code)
        elif code.co_freevars:
            self.platform.add(code)


_recording: list[Recorded] = []


@contextmanager
def recording() -> Generator[Recorded]:
    """While this is entered, what Dynamo traces and what runs under `watched` is noted."""
    found = Recorded()
    _recording.append(found)
    try:
        with traced_codes() as lists:
            yield found
    finally:
        _recording.remove(found)
    for code in {code for each in lists for code in each}:
        found.add(code)


def note_problem(why: str) -> None:
    """A reason not to store what is being captured."""
    for each in _recording[-1:]:
        each.problems.append(why)


@contextmanager
def watched() -> Generator[None]:
    """While this is entered, what runs is noted by whoever records; nothing is where nobody does."""
    if not _recording:
        yield
        return
    found = _recording[-1]
    if sys.getprofile() is not None:
        found.problems.append("a profiler is at work, so that nobody can see which functions run")
        yield
        return
    sys.setprofile(_Watcher(found))
    try:
        yield
    finally:
        sys.setprofile(None)


class _Watcher:
    """The profiler. `depth` is that of imports: what runs in them is no part of the forward."""

    def __init__(self, found: Recorded) -> None:
        self.found, self.depth = found, 0
        self._kinds: dict[CodeType, int] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        kind = self._kinds.get(frame.f_code)
        if kind is None:
            kind = self._first(frame)
        if kind == _PLATFORM and event != "c_call":
            return
        if kind == _IMPORTS:
            self.depth += (event == "call") - (event == "return")
        elif self.depth or kind == _READS:
            return
        elif event == "c_call":
            try:
                _look_at(self.found, frame, arg, kind)
            except Exception as error:  # an odd object, and never an error of the forward
                self.found.problems.append(f"{_place(frame)} calls something in C that cannot be looked at: {error}")
        elif kind == _READS_ENVIRONMENT and event == "call":
            key = frame.f_locals.get("key")
            if isinstance(key, str):
                self.found.environment[key] = os.environ.get(key)

    def _first(self, frame: FrameType) -> int:
        code = frame.f_code
        kind = _kind(code)
        if code.co_filename == "<string>" and _is_made_by_platform(frame):
            kind = _PLATFORM  # as `dataclass` makes methods
        elif not self.depth:
            self.found.add(code)
            if code in _WHOLE_ENVIRONMENT:
                self.found.problems.append(f"{_place(frame)} reads the whole environment")
        if not self.depth or kind not in (_USERS, _PLATFORM):
            self._kinds[code] = kind
        return kind


def _is_made_by_platform(frame: FrameType) -> bool:
    """Whether code without a file is of a module of the platform's, or is made by one just now."""
    by = frame.f_back if frame.f_code.co_name == "<module>" else None
    return is_platform(str(frame.f_globals.get("__file__") or "")) or (by is not None and is_platform(by.f_code.co_filename))


_PLATFORM, _USERS, _IMPORTS, _READS, _READS_ENVIRONMENT = range(5)


def _kind(code: CodeType) -> int:
    file = code.co_filename
    if file == "<frozen importlib._bootstrap>" and code.co_name == "_find_and_load":
        return _IMPORTS
    if code is _ENVIRONMENT:
        return _READS_ENVIRONMENT
    if not is_platform(file):
        return _USERS
    return _READS if file.startswith("<frozen") or (not is_torchs(file) and file.endswith(_READERS) or "/importlib/" in file) else _PLATFORM


def _look_at(found: Recorded, frame: FrameType, called: Any, kind: int) -> None:
    """What a call of something written in C reads, beside its arguments."""
    owner = getattr(called, "__self__", None)
    try:
        is_file, is_process = called in _FILES, called in _PROCESS
    except TypeError:
        return
    if kind == _USERS:
        is_clock = isinstance(owner, type) and issubclass(owner, datetime.date) and called.__name__ in ("now", "today", "utcnow")
        module = _module_of(called, owner)
        if module.partition(".")[0] not in _EXTENSIONS:
            found.problems.append(f"{_place(frame)} calls {called.__name__} of the extension {module}")
        is_process = is_process or is_clock or called.__name__ in ("fromfile", "memmap")
        is_process = is_process or module in _OUTSIDE or module.startswith("numpy.random")
    if is_process and (kind == _USERS and not _is_of_library(frame, called) or _is_pythons(frame)):
        found.problems.append(f"{_place(frame)} calls {called.__name__}, whose answer may be another one each time")
    if is_file:
        found.problems.append(f"{_place(frame)} reads a file or a folder")
    if isinstance(owner, random.Random) and (kind == _USERS or is_library(frame.f_code.co_filename)):
        found.problems.append(f"{_place(frame)} draws a random number of Python's")


def _is_of_library(frame: FrameType, called: Any) -> bool:
    """Whether a library asks for an identity, by which it knows what it has seen."""
    return called in (id, hash) and is_library(frame.f_code.co_filename)


def _is_pythons(frame: FrameType) -> bool:
    """Whether the standard library asks: `platform`, `uuid`, `tempfile`; but not for identities."""
    file = frame.f_code.co_filename
    return is_library(file) and "site-packages" not in file and file.endswith(_ASKING)


def _module_of(called: Any, owner: Any) -> str:
    """Where a function written in C is from; a method is where the class of its object that is written in C is."""
    module = getattr(called, "__module__", None)
    if module is not None or owner is None:
        return module or ""
    kind = owner if isinstance(owner, type) else type(owner)
    return next(each.__module__ for each in kind.__mro__ if not each.__flags__ & _MADE_AT_RUN_TIME or each.__module__ in _EXTENSIONS)


def _place(frame: FrameType) -> str:
    """The innermost line of the user's."""
    at: FrameType | None = frame
    while at is not None and is_platform(at.f_code.co_filename):
        at = at.f_back
    at = at or frame
    return f"{at.f_code.co_filename}:{at.f_lineno}"
