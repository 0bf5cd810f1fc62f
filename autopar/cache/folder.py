"""A folder of files, each with the digest of what it holds. What is broken, cut off or of others is not there."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("autopar")
_MAGIC = b"autopar compiled call 1\n"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class CacheFolder:
    """What is read from it is run: it must be as trusted as the code, and is made for its owner alone."""

    path: Path

    def read(self, key: str) -> bytes | None:
        """What was written under `key`; None where nothing was, or not that, which is warned of."""
        file = self.path / key
        try:
            if not file.exists():
                return None
            self._refuse_others(file)
            content = file.read_bytes()
        except OSError as error:
            logger.warning("the compiled program in %s is not read: %s", file, error)
            return None
        digest, payload = content[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
            logger.warning("the compiled program in %s is not read: the file is broken, or none of ours; it is compiled again", file)
            return None
        return payload

    def write(self, key: str, payload: bytes) -> None:
        """All of it or nothing. Where it cannot be written it is not, and the log says so."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path, prefix=".")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
                os.replace(name, self.path / key)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning("the compiled program is not kept in %s: %s", self.path, error)

    def _refuse_others(self, file: Path) -> None:
        """Raise `PermissionError` where others than this user, or root, can have written what is read."""
        for each in (self.path, file) if hasattr(os, "getuid") else ():
            found = each.stat()
            if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(f"others may write to {each}: it must be its owner's alone (chmod 700)")
