"""Deep copies of a parallel module, which averages of parameters and evaluation are made of."""

from __future__ import annotations

import copy
from typing import Any

from autopar.errors import MeshError
from autopar.frontend.module_hooks import FORWARD_HOOK_FLAGS, FORWARD_HOOKS
from autopar.runtime.module.captures import CapturingModule


def share_captures(parallel: CapturingModule, copied: CapturingModule, memo: dict[int, Any]) -> None:
    """Let `copied`, of a copy of the model of `parallel`, begin where that is: with its programs, its step and copies of its hooks."""
    copied.seed, copied.step, copied._latest = parallel.seed, parallel.step, parallel._latest
    copied._captures, copied._placements = dict(parallel._captures), dict(parallel._placements)
    copied._guard = parallel._guard.copied(copied._model)
    for name in (*FORWARD_HOOKS, *FORWARD_HOOK_FLAGS):
        copied.__dict__[name] = copy.deepcopy(parallel.__dict__[name], memo)


def check_copy(parallel: CapturingModule) -> None:
    """Raise `MeshError` where a copy could not run what is compiled with the parts of parameters that this process has."""
    if not parallel._captures:
        raise MeshError("a copy on a real mesh before the first capture: its parameters have no places yet; call the module first")
    elsewhere = next((name for name, parameter in parallel._model.named_parameters() if parameter.is_meta), None)
    if elsewhere is not None:
        raise MeshError(
            f"a copy of one stage of a pipeline: {elsewhere!r} lies with another stage only, and what averages parameters would pair "
            "this process's with those of the whole model; average the values of state_dict() instead"
        )
