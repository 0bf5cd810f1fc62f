"""Compiles in a folder: what a capture gave, and what the joint trace made of a program, for the next process that asks for the same.

A capture is found in two steps. Its name is a digest of what is quickly said (versions, flags, the model's tensors, the call's shapes).
In the file stands which functions the capture executed, the digests of their files, and that of the `Description` of everything these
functions could read. All of this is looked at in the process that asks; where anything differs it captures. A joint trace is a function
of the program that is traced, and is found by the digest of it.

On many ranks rank 0 reads, and the others get from it what it read. A rank whose own description is another captures for itself, and
the comparison of the ranks' programs tells what differs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autopar._torch import pytree
from autopar.cache.describe import Description
from autopar.cache.encode import CannotStore, Unreadable
from autopar.cache.folder import Folder
from autopar.cache.recorded import Recorded, recording
from autopar.cache.stored_program import digest, read, written
from autopar.cache.surroundings import content_of, surroundings
from autopar.cost.hardware.kept import FOLDER, kept_path
from autopar.driver.decide_once import FromFirst
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program

logger = logging.getLogger("autopar")
T = TypeVar("T")
_MOST_ALIKE = 8  # captures of one name that are looked into


@dataclass(frozen=True)
class Call:
    """What is captured, and how: the arguments of `autopar.frontend.capture.capture`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: Mesh
    outputs: str | None
    batch_dims: Mapping[int, int] | None

    def name(self) -> str:
        """A digest of what is quickly said. Raises `CannotStore`."""
        tensors = (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False))
        said = [
            surroundings(),
            [(name, tuple(each.shape), str(each.dtype), each.device.type, each.requires_grad) for name, each in tensors],
            [(name, type(each).__qualname__, each.training) for name, each in self.model.named_modules()],
            [
                _example(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                for leaf in pytree.tree_leaves((self.args, self.kwargs))
            ],
            self.outputs,
            None if self.batch_dims is None else sorted(self.batch_dims.items()),
            self.mesh.num_microbatches > 1,
        ]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def described(self, walk: Description) -> str:
        """The digest of what the capture could read. Raises `CannotStore`."""
        examples = pytree.tree_map_only(torch.Tensor, _example, (self.args, self.kwargs))
        return walk.of(self.model, examples)


def said(describe: Callable[[], T]) -> T:
    """What `describe` gives. Whatever the user's objects raise when they are looked at is a `CannotStore`, and no error of a compile."""
    try:
        return describe()
    except CannotStore:
        raise
    except Exception as error:
        raise CannotStore(f"{type(error).__name__} as it was described: {error}") from error


def _example(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


@dataclass
class CompileCache:
    """The folder, and how ranks hear of what rank 0 found there. `file` is the capture that was read, if one was."""

    folder: Folder
    from_first: FromFirst | None = None
    is_first: bool = True
    file: str = ""
    _joints: dict[str, Program] = field(default_factory=dict[str, Program])
    _walk: Description | None = None  # of the file that fits, where this process looked

    @staticmethod
    def of(cache: bool | str | os.PathLike[str] | None) -> CompileCache | None:
        """Raises `AutoparError` for what names no folder."""
        if cache is None or cache is False:
            return None
        if cache is True:
            return CompileCache(Folder(kept_path("cpu").parent / "compiles"))
        if not isinstance(cache, (str, os.PathLike)) or not str(cache):
            raise AutoparError(f"cache={cache!r} is neither True nor a folder; True is ~/.cache/autopar/compiles, or a folder in ${FOLDER}")
        return CompileCache(Folder(Path(cache).expanduser()))

    def on_ranks(self, from_first: FromFirst | None) -> CompileCache:
        """The same for one compile of these ranks; `from_first` is None where they are all in this process."""
        return CompileCache(self.folder, from_first, from_first is None or torch.distributed.get_rank() == 0)

    # ---- captures

    def captured(self, call: Call, make: Callable[[], Program]) -> Program:
        """What `make()` gives, or what it gave to an earlier process in which all was the same. Collective."""
        try:
            name = said(call.name)
        except CannotStore as why:
            name = ""
            logger.info("the capture is not looked up: %s", why)
        self._walk = None
        text = self._told(lambda: self._found(name, call) if name else "")
        program = self._read_capture(text, name, call) if text and name else None
        if program is not None:
            self.file, self._walk = json.loads(text)["file"], None
            logger.info("the capture was read from %s", self.file)
            return program
        if not name or not self.is_first:
            return make()
        with recording() as recorded:
            program = make()
        self._store(name, call, recorded, program)
        return program

    def _found(self, name: str, call: Call) -> str:
        """On rank 0: the content of a file that fits, in words for all ranks; empty where none does."""
        for each in self.folder.names(name)[:_MOST_ALIKE]:
            entry = self.folder.read(each)
            try:
                self._walk = self._fits(entry, call) if entry is not None else None
                if entry is not None and self._walk is not None:
                    return json.dumps({**entry, "file": str(self.folder.file(each)), "name": name})
            except Exception as error:  # all ranks would raise it
                self.folder.distrust(each, f"{type(error).__name__}: {error}")
        return ""

    def _fits(self, entry: Any, call: Call) -> Description | None:
        """The description of this process, if it is the entry's."""
        recorded = entry["recorded"]
        if any(os.environ.get(name) != value for name, value in recorded["environment"].items()):
            return None
        if any(content_of(path) != content for path, content in recorded["files"].items()):
            return None
        walk = Description(frozenset((file, code, line) for file, code, line in recorded["executed"]))
        try:
            return walk if said(lambda: call.described(walk)) == entry["described"] else None
        except CannotStore:
            return None

    def _read_capture(self, text: str, name: str, call: Call) -> Program | None:
        entry = json.loads(text)
        try:
            walk = self._walk or (self._fits(entry, call) if entry["name"] == name else None)
            if walk is None:
                logger.warning("rank 0 read its capture, and this rank's model or surroundings differ from rank 0's: it captures")
                return None
            return read(entry["program"], call.mesh, walk.classes)
        except (Unreadable, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s is not read, and the model is captured: %s", entry.get("file"), error)
            return None

    def _store(self, name: str, call: Call, recorded: Recorded, program: Program) -> None:
        walk = Description(recorded.all_names)
        try:
            if recorded.problems:
                raise CannotStore(recorded.problems[0])
            described = said(lambda: call.described(walk))
            unknown = sorted(recorded.names - walk.described)
            if unknown:
                file, function, line = unknown[0]
                raise CannotStore(f"forward calls {function} ({file}:{line}), and nothing that it names leads there")
            entry = {
                "recorded": {
                    "executed": sorted(recorded.all_names),
                    "files": {file: content_of(file) for file in sorted({file for file, _, _ in recorded.names})},
                    "environment": recorded.environment,
                },
                "described": described,
                "program": said(lambda: written(program)),
            }
        except CannotStore as why:
            logger.warning("the capture is not kept for other processes: %s", why)
            return
        self.folder.write(f"{name}-{described[:16]}", entry)

    # ---- joint traces

    def traced(self, program: Program, words: tuple[Any, ...], make: Callable[[], Program]) -> Program:
        """What `make()` makes of `program`, for which `words` stand, or what it made of an equal one in an earlier process. Collective."""
        try:
            key = said(lambda: hashlib.sha256(repr((surroundings(), words, digest(program))).encode()).hexdigest())
        except CannotStore as why:
            key = ""
            logger.info("the joint trace is not looked up: %s", why)
        if key and key in self._joints:
            return self._joints[key]
        text = self._told(lambda: self._found_joint(key) if key else "")
        joint = self._read_joint(text, key, program) if text and key else None
        if joint is None:
            joint = make()
            if key and self.is_first and not text:
                self._store_joint(key, joint)
        self._joints[key] = joint
        return joint

    def _found_joint(self, key: str) -> str:
        entry = self.folder.read(f"{key}-joint")
        return json.dumps({"key": key, "joint": entry}) if entry is not None else ""

    def _read_joint(self, text: str, key: str, program: Program) -> Program | None:
        entry = json.loads(text)
        try:
            if entry["key"] != key:
                logger.warning("rank 0 read its joint trace, of another program than this rank's: it traces")
                return None
            found = read(entry["joint"], program.mesh, {})
        except (Unreadable, KeyError, TypeError) as error:
            self.folder.distrust(f"{key}-joint", str(error))
            return None
        signature = replace(program.signature, inputs=found.signature.inputs, outputs=found.signature.outputs)
        more = {"constants": program.constants, "freedom": program.freedom, "order": program.order, "precision": program.precision}
        return replace(found, signature=signature, **more)

    def _store_joint(self, key: str, joint: Program) -> None:
        try:
            plain = replace(joint.signature, structure=None, leaves=())
            self.folder.write(f"{key}-joint", said(lambda: written(replace(joint, signature=plain), has_constants=False)))
        except CannotStore as why:
            logger.info("the joint trace is not kept: %s", why)

    def _told(self, make: Callable[[], str]) -> str:
        """What `make` gives on rank 0, on all."""
        return make() if self.from_first is None else self.from_first(make)
