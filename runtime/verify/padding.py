"""Whether a model gives the same for a batch that is padded to a longer length: the word that who asks for `pad_to` gives."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.graph.promote import Promoting, default_float64, dtype_of
from autopar.ir.program import Signature
from autopar.runtime.module.inputs import CallInputs
from autopar.runtime.verify.compare_forms import case_of, named_values
from autopar.runtime.verify.copied_model import copy_model
from autopar.runtime.verify.errors import errors_between
from autopar.runtime.verify.reference_run import Results, run_original
from autopar.runtime.verify.report import PaddingChange
from autopar.runtime.verify.same_draws import SameDraws

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def padding_change(
    model: nn.Module, signature: Signature, own: Arguments, padded: Arguments, lengths: tuple[int, int], promote: bool
) -> PaddingChange:
    """How far what `model` gives for the `padded` batch, cut to what it gives for its `own`, is from that, with the gradients of its loss.

    `signature` is that of FORWARD, `lengths` those of the two batches. Draws are the same at all positions: of another shape a model
    draws others. Nothing of `model` changes.
    """
    outputs = tuple(replace(item, requires_grad=item.requires_grad and item.kind == "loss") for item in signature.outputs)
    signature = replace(signature, outputs=outputs)
    wanted, found = (_results(model, signature, each, promote) for each in (own, padded))
    cut = {name: each[tuple(map(slice, wanted.outputs[name].shape))] for name, each in found.outputs.items()}
    case = case_of(model, CallInputs.of(*own), 0, {}, promote)
    return PaddingChange(*lengths, *errors_between(replace(found, outputs=cut), wanted, case).worst)


def _results(model: nn.Module, signature: Signature, call: Arguments, promote: bool) -> Results:
    inputs = CallInputs.of(*call)
    training = any(item.requires_grad for item in signature.outputs)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if promote:
            stack.enter_context(default_float64())
        case = case_of(model, inputs, 0, {}, promote)
        copied = copy_model(model, {id(value): case.state[name] for name, value in named_values(model).items()}, promoted=promote)
        args, kwargs = inputs.call(lambda index, tensor: case.leaves[index].clone())
        if promote:
            stack.enter_context(Promoting(dtype_of(model)))
        stack.enter_context(SameDraws())
        return run_original(copied, args, kwargs, signature, case, training and torch.is_grad_enabled())
