"""The captured program with its random ops keyed and nothing else rewritten: what `verify` compares with if the model has dropout."""

from __future__ import annotations

import torch

from autopar.graph.emit import Emitter, replace
from autopar.ir.program import Program
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.forward.unify_attention import AttentionCall, plain_attention

aten = torch.ops.aten


def key_captured(program: Program) -> Program:
    """A FORWARD program, after whatever pass, with its draws keyed as the compiled program's are; one that is keyed as it is.

    Attention that draws inside is written out for that, by torch's formula. See `number_sites` for why the draws are the same.
    """
    if program.signature.inputs_of("random_key"):
        return program
    program = program.copy()
    for node in list(program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)):
        call = AttentionCall.of(node)
        if call.dropout_p > 0.0:
            for user in node.users:  # the layout is another
                user.target = aten.reshape.default if user.target is aten.view.default else user.target
            replace(node, plain_attention(Emitter(program.graph, before=node), call))
    return KeyRandom().apply(program)
