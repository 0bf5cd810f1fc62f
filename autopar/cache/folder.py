"""The folder: small files that are there whole or not at all, checked by their sum when they are read, the oldest removed.

    {"autopar": "compiles", "format": 1, "sha256": "…"}       first line
    {"recorded": …, "program": …}                             the rest, JSON

Nothing here fails a compile: what cannot be read or written is said in the log, with the name of the file, and done without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("autopar")

# Of what is written and how: another format is another key, and no file of it is read.
FORMAT = 1
MOST_BYTES = 2 << 30
_LARGEST = 1 << 30
# A name that nobody has made a file of for so long is of a process that was killed.
_ABANDONED_SECONDS = 3600.0
_SUFFIX = ".json"


@dataclass(frozen=True)
class Folder:
    """`path` need not be there."""

    path: Path

    def names(self, prefix: str) -> list[str]:
        """Those that begin with `prefix`, the latest used first."""
        try:
            found = [(each.stat().st_mtime_ns, each.name) for each in os.scandir(self.path) if _is_ours(each.name, prefix)]
        except OSError:
            return []
        return [name.removesuffix(_SUFFIX) for _, name in sorted(found, reverse=True)]

    def file(self, name: str) -> Path:
        return self.path / f"{name}{_SUFFIX}"

    def read(self, name: str) -> Any:
        """What was written under `name`; None where there is nothing, or nothing that could be trusted."""
        path = self.file(name)
        try:
            if path.stat().st_size > _LARGEST:
                return self.distrust(name, "it is too large")
            head, _, body = path.read_bytes().partition(b"\n")
            header = json.loads(head)
            if not isinstance(header, dict) or (header.get("autopar"), header.get("format")) != ("compiles", FORMAT):
                return self.distrust(name, "it is no file of this cache, or of another release's")
            if hashlib.sha256(body).hexdigest() != header.get("sha256"):
                return self.distrust(name, "its content does not have its SHA-256: it was cut off or changed")
            found = json.loads(body)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            return self.distrust(name, str(error))
        try:
            os.utime(path)  # the oldest are removed: this one is used
        except OSError:
            pass
        return found

    def distrust(self, name: str, why: str) -> None:
        logger.warning("%s is not read, and what it was for is made anew: %s", self.file(name), why)

    def write(self, name: str, content: Any) -> Path | None:
        """The file that has `content` now; None where it could not be written."""
        path, temporary = self.file(name), self.path / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        body = json.dumps(content, allow_nan=False).encode()
        head = json.dumps({"autopar": "compiles", "format": FORMAT, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._trim(len(body))
            with open(temporary, "xb") as file:
                file.write(head + b"\n" + body)
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("the compile is not kept in %s: %s", path, error)
            try:
                temporary.unlink(missing_ok=True)
            except OSError:
                pass
            return None
        return path

    def _trim(self, more: int) -> None:
        """Make room for `more` bytes, and remove what killed processes left."""
        found: list[tuple[int, int, str]] = []
        for each in os.scandir(self.path):
            try:
                status = each.stat()
                if each.name.startswith(".") and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    os.unlink(each.path)
                elif _is_ours(each.name):
                    found.append((status.st_mtime_ns, status.st_size, each.path))
            except OSError:  # another process removed it
                continue
        total = more + sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= MOST_BYTES:
                return
            try:
                os.unlink(path)
            except OSError:
                continue
            total -= size


def _is_ours(name: str, prefix: str = "") -> bool:
    return name.startswith(prefix) and name.endswith(_SUFFIX) and not name.startswith(".")
