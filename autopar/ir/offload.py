"""What is kept elsewhere than on the device between its uses, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autopar.errors import AutoparError

Away = Literal["host", "file"]
# Copies of less cost more to start than they bring.
SMALLEST_BYTES = 1 << 16


@dataclass(frozen=True)
class Offload:
    """What lies in "host" memory, pinned where the device is a GPU, or in a "file", until shortly before it is used.

    activations     what the backward reads of the forward: so much of it as lowers the peak of a rank, what is needed last first. With
                    "auto" host memory, where a memory budget binds and a step takes less time so, on paper, than with all else that fits:
                    computed again, or in parts over ranks
    optimizer       the optimizer's state, on the host, which updates there in a `train_step`, while the device goes on (ZeRO-Offload,
                    Ren et al., arXiv:2101.06840): gradients go there once they are final, and updated parameters come back. In a "file"
                    it is mapped into the host's memory, from which the system takes it where that runs short (ZeRO-Infinity's place for
                    it, Rajbhandari et al., arXiv:2104.07857)
    parameters      parameters, of which the device has copies while it reads them, and the optimizer's state, which lies with what it
                    updates unless `optimizer` says another place
    folder          where files are: on a fast drive of the machine. They have no names and are gone with their process, however it ends
    smallest_bytes  what is smaller stays; of a parameter the copy does, once it is there

    Raises `AutoparError` for values that it cannot have.
    """

    activations: Away | Literal["auto"] | None = None
    optimizer: Away | None = None
    parameters: Away | None = None
    folder: str | None = None
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        if self.activations not in (None, "host", "file", "auto"):
            raise AutoparError(f'Offload(activations={self.activations!r}) is no place; use "host", "file", "auto" or None')
        if self.optimizer not in (None, "host", "file"):
            raise AutoparError(f'Offload(optimizer={self.optimizer!r}) is no place; use "host", "file" or None')
        if self.parameters not in (None, "host", "file"):
            raise AutoparError(f'Offload(parameters={self.parameters!r}) is no place; use "host", "file" or None')
        if self.smallest_bytes < 0:
            raise AutoparError(f"Offload(smallest_bytes={self.smallest_bytes}) is less than nothing; use 0 to move everything")
        if self.uses_files and self.folder is None:
            raise AutoparError(
                "offload to files needs to know where: Offload(..., folder=path) on a fast drive; /tmp is often memory itself"
            )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise AutoparError(f"Offload(folder={self.folder!r}): there is no such folder; make it, or name another")

    def with_activations(self, place: Away | None) -> Offload | None:
        """The same with activations there; None where nothing is left that lies elsewhere."""
        found = replace(self, activations=place)
        return found if any((found.activations, found.optimizer, found.parameters)) else None

    @property
    def uses_files(self) -> bool:
        return "file" in (self.activations, self.optimizer, self.parameters)

    @property
    def state(self) -> Away | None:
        """Where the state of the optimizer lies, which updates there; None on the device."""
        return self.optimizer or self.parameters

    @property
    def updated(self) -> str:
        """What has the host update, as errors name it."""
        return "optimizer" if self.parameters is None else "parameters"

    @staticmethod
    def of(asked: Any) -> Offload | None:
        """`offload=` of `autopar.compile`: None, "activations", "optimizer" or "parameters", to host memory, "auto", or an `Offload`.
        Raises `AutoparError` for another."""
        if asked is None or isinstance(asked, Offload):
            return asked
        if asked == "activations":
            return Offload(activations="host")
        if asked == "optimizer":
            return Offload(optimizer="host")
        if asked == "parameters":
            return Offload(parameters="host")
        if asked == "auto":
            return Offload(activations="auto")
        raise AutoparError(
            f'offload={asked!r} is unknown; use "auto", "activations", "optimizer", "parameters", or '
            'autopar.Offload(activations="host" or "file")'
        )
