"""Whether a call has values to compute with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.errors import InputError, MeshError
from autopar.runtime._torch import has_values, is_fake_mode_active
from autopar.runtime.module.inputs import CallInputs


def check_values(inputs: CallInputs, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise for a call that has no values to compute with: it can be planned, but not run.

    `named` are the model's parameters and buffers; like the inputs they may be on meta or fake, or the caller in a fake mode.
    """
    if is_fake_mode_active():
        raise MeshError("the call stands in a FakeTensorMode, where nothing has values: compile and explain there, but call outside of it")
    without = [name for name, tensor in named if not has_values(tensor)]
    if without:
        raise MeshError(
            f"{len(without)} parameters and buffers are on meta or fake, the first is {without[0]!r}: without values the program can be "
            'planned, explained and printed, but not run. Give them values, model.to_empty(device="cpu") and then load_state_dict '
            "(which ties no weights), and call again; or keep the plan, parallel.plan.save(path), for where the model has values"
        )
    without = [name for _, name, tensor in inputs.tensors if not has_values(tensor)]
    if without:
        names = ", ".join(map(repr, without))
        raise InputError(f"on meta or fake, without values: {names}; a program can be planned with them, but not run: pass real tensors")
