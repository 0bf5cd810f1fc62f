"""A torch optimizer whose state lies in host memory, and which updates there while the device goes on.

    device   … backward of layer 3      backward of layer 2      backward of layer 1    (wait)
                        gradients ↓                ↓                        ↓           ↑ parameters
    host                    update of layer 3 …        update of layer 2 …      update of layer 1

ZeRO-Offload's split (Ren et al., arXiv:2101.06840), but for what it keeps: parameters are read anew from the device at each update, so that
whatever the user writes into them holds. Those that lie on the host are updated there (ZeRO-Infinity, Rajbhandari et al.,
arXiv:2104.07857).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.driver.train_step import Scope
from autopar.errors import AutoparError, OffloadError
from autopar.ir.offload import Offload
from autopar.runtime.execute.world import local_of
from autopar.runtime.module.placement import like
from autopar.runtime.offload.memories import Block, HostMemory
from autopar.runtime.offload.state_files import Seal, StateFiles
from autopar.runtime.offload.worker import Work, Worker
from autopar.runtime.train.partial_step import by_group, narrowed
from autopar.runtime.train.stand_ins import check_parts, parts_of_state

# How many updates may wait for the host; a further one waits for the first of these.
MAX_WAITING = 4


class HostStep:
    """Steps `optimizer` for the parameters that are named, in a thread; `finish` waits for all of it.

    State is in host memory, or in `files`, where each is checked by its checksum before it is used.

    It sees this rank's parts of the parameters as plain tensors on the host, and must go element by element. State is handed on under
    the parameters themselves, as it lies in host memory; what somebody puts there is moved before it is used.
    """

    wholes = None

    def __init__(
        self, optimizer: Optimizer, scope: Scope, host: HostMemory, files: StateFiles | None = None, offload: Offload | None = None
    ) -> None:
        asked = offload or Offload(optimizer="host")
        if scope != "element":
            raise AutoparError(
                f"{type(optimizer).__name__} is not known to update each number by itself, as the host updates parts of parameters: use "
                f"one of torch.optim that does (Adam, AdamW, SGD, …), leave Offload({asked.updated}=) out, or, where that is so, say "
                'TrainStep(update_scope="element")'
            )
        self._is_in_place = asked.parameters is not None
        self.optimizer, self._host, self._files, self._process = optimizer, host, files, os.getpid()
        self._worker = Worker("autopar updates")
        self._waiting: list[Work] = []
        # On a GPU the one by which the thread copies.
        self._stream: torch.cuda.Stream | None = None
        # What this put into the optimizer's state, on the host: another entry was put there by somebody else.
        self._held: dict[nn.Parameter, dict[Any, torch.Tensor]] = {}
        self._seals: dict[nn.Parameter, dict[Any, Seal]] = {}

    def begin(self) -> None:
        """What is stepped from now on makes a new step."""

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """By the gradients that they have, which are copied at once and may be dropped."""
        if self._files is not None and self._process != os.getpid():
            raise OffloadError(
                f"the optimizer's state lies in files of process {self._process}, from which this one ({os.getpid()}) forked off: train "
                "there, or load a checkpoint into a module that is compiled here"
            )
        while len(self._waiting) >= MAX_WAITING:
            self._waiting.pop(0).result()
        gradients = [self._copied(local_of(each.grad)) for each in parameters if each.grad is not None]
        assert len(gradients) == len(parameters), "what is updated has a gradient"
        copied = torch.cuda.current_stream().record_event() if gradients and local_of(parameters[0]).is_cuda else None
        if copied is not None:
            for block, _ in gradients:
                block.uses.append(copied)
        self._waiting.append(self._worker.submit("an update", self._update, list(parameters), gradients, copied))

    def finish(self) -> None:
        """Wait until parameters are what they will be: where an update fails the others are over, too, before that is raised."""
        waiting, self._waiting = self._waiting, []
        failed: Exception | None = None
        for each in waiting:
            try:
                each.result()
            except Exception as error:
                failed = failed or error
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # which knows this frame

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise `AutoparError` for state that somebody put there and that cannot be this rank's part."""
        for each in parameters:
            outer = self.optimizer.state.get(each)
            if outer and isinstance(each, DTensor):
                check_parts(parts_of_state(outer), local_of(each))

    def state_tensors(self) -> list[torch.Tensor]:
        """What the optimizer holds on the device: nothing."""
        return []

    @torch.no_grad()
    def _update(self, parameters: Sequence[nn.Parameter], gradients: list[tuple[Block, torch.Tensor]], copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        with self._beside(local_of(parameters[0]).device):
            self._update_on_host(parameters, gradients)

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where the thread copies by a stream of its own: the default one, which all threads share, has what the backward has launched
        so far. All that reads these parameters was over before."""
        if device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)

    def _update_on_host(self, parameters: Sequence[nn.Parameter], gradients: list[tuple[Block, torch.Tensor]]) -> None:
        state = self.optimizer.state
        locals_ = [local_of(each.detach()) for each in parameters]
        masters = [self._master(each) for each in locals_]
        for parameter, (_, master), (_, gradient) in zip(parameters, masters, gradients, strict=True):
            master.grad = gradient
            if outer := state.get(parameter):
                self._check_seals(parameter, parts_of_state(outer))
                state[master] = self._on_host(parameter, parts_of_state(outer))
        chosen = {id(each): master for each, (_, master) in zip(parameters, masters, strict=True)}
        try:
            with narrowed(self.optimizer, by_group(self.optimizer, chosen)):
                self.optimizer.step()
        except BaseException:
            for _, master in masters:
                state.pop(master, None)
            raise
        gradients.clear()  # whoever runs this may hold them for longer
        for parameter, local, (block, master) in zip(parameters, locals_, masters, strict=True):
            if block is not None:
                local.copy_(master)
            if (found := state.pop(master, None)) is not None:
                self._hand_on(parameter, master, self._on_host(parameter, found))

    def _master(self, local: torch.Tensor) -> tuple[Block | None, torch.Tensor]:
        """What is updated of a parameter: itself where it lies on the host."""
        return (None, local.detach()) if self._is_in_place and not local.is_cuda else self._copied(local, waits=True)

    def _copied(self, tensor: torch.Tensor, waits: bool = False) -> tuple[Block, torch.Tensor]:
        """On the host, in a block that must be held as long."""
        block = self._host.take(tensor.nbytes)
        copy = self._host.bytes_of(block).view(tensor.dtype).view(tensor.shape)
        return block, copy.copy_(tensor, non_blocking=not waits)

    def _check_seals(self, parameter: nn.Parameter, entries: Mapping[Any, Any]) -> None:
        held, seals = self._held.get(parameter, {}), self._seals.get(parameter, {})
        for key, value in entries.items():
            if self._files is not None and key in seals and held.get(key) is value:
                self._files.check(value, seals[key], f"the {key} of a parameter of shape {list(parameter.shape)}")

    def _on_host(self, parameter: nn.Parameter, entries: Mapping[Any, Any]) -> dict[Any, Any]:
        """The same, with tensors in host memory that is no longer the optimizer's; numbers as they are."""
        held = self._held.setdefault(parameter, {})
        found: dict[Any, Any] = dict(entries)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.ndim and held.get(key) is not value:
                found[key] = held[key] = (self._files or self._host).like(value)
        return found

    def _hand_on(self, parameter: nn.Parameter, master: torch.Tensor, entries: Mapping[Any, Any]) -> None:
        """Under the parameter, as it lies."""
        if self._files is not None:
            self._seals[parameter] = {key: StateFiles.seal(value) for key, value in self._held.get(parameter, {}).items()}
        outer = self.optimizer.state[parameter]
        for key, value in entries.items():
            is_part = isinstance(value, torch.Tensor) and value.ndim and value.shape == master.shape
            before = outer.get(key)
            if not is_part or not isinstance(parameter, DTensor):
                outer[key] = value
            elif not isinstance(before, DTensor) or local_of(before) is not value:
                outer[key] = like(parameter, value)
