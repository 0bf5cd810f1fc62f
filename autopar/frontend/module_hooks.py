"""Where an `nn.Module` keeps its hooks: what capture sets aside, what is compared before a call, what a copy takes along."""

from __future__ import annotations

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# How forward hooks are called, by the same keys: with keyword arguments, and after an error, too.
FORWARD_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
