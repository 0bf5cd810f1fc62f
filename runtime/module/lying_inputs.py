"""Inputs of which forward asks how they lie: a program has one answer, that of inputs which lie row by row."""

from __future__ import annotations

from autopar.errors import InputError
from autopar.ir.program import Signature
from autopar.runtime.execute.agreement import agreed
from autopar.runtime.execute.world import World
from autopar.runtime.module.inputs import CallInputs


def check_lying(inputs: CallInputs, signature: Signature, world: World) -> None:
    """Raise `InputError` for inputs that lie otherwise, where forward asks. Collective where it does."""
    asked = {int(item.name): item.asked for item in signature.inputs_of("batch") if item.asked}

    def check() -> None:
        for index, name, tensor in inputs.tensors:
            if index in asked and not tensor.is_contiguous():
                raise InputError(
                    f"what forward does goes by how {name!r} lies in memory, and it lies with strides {tensor.stride()}, shape "
                    f"{tuple(tensor.shape)}; a program takes inputs row by row\n  where: {asked[index]}\n  how to mend it: pass "
                    f"{name}.contiguous(), or leave the question out of forward (where it writes: say .clone(), or out of place)"
                )

    if asked:
        agreed(world, check, "a comparison of how inputs lie")
