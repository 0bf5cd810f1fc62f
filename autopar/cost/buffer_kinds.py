"""What the bytes of a rank are made of, buffer by buffer."""

from __future__ import annotations

from typing import Literal

from autopar.ir.instructions import Launch, Update
from autopar.ir.program import InputKind
from autopar.ir.schedule import Schedule

# parameters   with the model's buffers
# inputs       the batch, constants, coordinates
# gradients    of parameters, from the sum over microbatches or the operand of their reduction on
# activations  values of a forward or a backward between two instructions, those that the backward reads among them
# temporaries  what a fragment or an update needs within itself
# in flight    what is received, and results of collectives until their WAIT
# buckets      memory in which several buffers are put together
Kind = Literal["parameters", "inputs", "gradients", "optimizer", "activations", "temporaries", "in flight", "buckets"]

_INPUTS: dict[InputKind, Kind] = {"parameter": "parameters", "buffer": "parameters"}


def kinds_of(schedule: Schedule) -> dict[str, Kind]:
    """By name of a buffer; what is not named is an activation."""
    found: dict[str, Kind] = dict.fromkeys(schedule.buffers, "activations")
    results = dict(zip(schedule.outputs, schedule.signature.outputs, strict=False))
    found |= {name: "gradients" for name, item in results.items() if item.kind == "gradient"}
    for instruction in reversed(schedule.instructions):
        if isinstance(instruction, Update):
            found |= dict.fromkeys(instruction.gradients, "gradients")
        elif isinstance(instruction, Launch):
            pairs = zip(instruction.sources, instruction.targets, strict=False)
            found |= {source: "gradients" for source, target in pairs if found.get(target) == "gradients"}
    found |= {name: "gradients" for name, each in schedule.buffers.items() if each.role == "sum" and name not in results}
    found |= {name: "parameters" for name, each in schedule.buffers.items() if each.role == "parameter"}  # versions of them, too
    for item, name in zip(schedule.signature.inputs, schedule.inputs, strict=False):
        found[name] = _INPUTS.get(item.kind, "inputs")
    return found
