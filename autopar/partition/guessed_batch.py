"""Which dim of the inputs is the batch, where nobody said it: dim 0 was taken, which of inputs of `[length, batch]` are positions.

Nothing is decided here. What cannot be split over the samples, or run in microbatches, is said together with what was taken for them, and
with another dim where that is known to do: one over which no op of the program mixes samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.program import Input, Program
from autopar.ops.batch_atoms import with_batch
from autopar.partition.whole_batch import Mixing, mixing, undivided


@dataclass(frozen=True)
class OtherBatch:
    """Dim 1 of the inputs, `size` long, over which no op mixes samples; `option` is how the user says that it is the batch."""

    size: int
    option: str


def guessed_inputs(program: Program) -> list[Input]:
    """Those of which dim 0 was taken for the batch; none where the user said which dim it is."""
    return _with_samples(program) if program.signature.guessed else []


def may_be_other(program: Program) -> bool:
    """Whether the batch that was guessed may be another dim: an input of one dim (a label for each sample) tells that it is not."""
    guessed = guessed_inputs(program)
    return bool(guessed) and all(len(item.shape) > 1 for item in guessed)


def what_was_taken(program: Program) -> str:
    """`dim 0 of the inputs (17)`; nothing where the user said which dim is the batch."""
    sizes = dict.fromkeys(item.shape[0] for item in guessed_inputs(program))
    return f"dim 0 of the inputs ({', '.join(map(str, sizes))})" if sizes else ""


def other_batch(program: Program) -> OtherBatch | None:
    """The dim that does where the one that was guessed does not, of a GLOBAL program with atoms. Takes a second or two of a large one."""
    if not may_be_other(program):
        return None
    for size in dict.fromkeys(item.shape[1] for item in guessed_inputs(program)):
        dims = {item.name: dim for item in program.signature.inputs_of("batch") if (dim := _dim_as_long(item, size)) is not None}
        if size > 1 and not _mixes(program, dims, size):
            return OtherBatch(size, _option(program, dims))
    return None


def hint(program: Program, found: Sequence[Mixing]) -> str:
    """What to say beside the places that were `found` to mix what was guessed to be samples; nothing where they do not speak against
    it: the statistics of a batch norm do not."""
    if not may_be_other(program) or all(each.has_estimate for each in found):
        return ""
    taken, other = f"{what_was_taken(program)} was taken for the batch; if", other_batch(program)
    if other is None:
        return f"{taken} another dim is, as where time comes first, say so by batch_dims="
    return f"{taken} dim 1 ({other.size}) is, as where time comes first, say so: {other.option}; over it microbatches change nothing"


def _with_samples(program: Program) -> list[Input]:
    return [item for item in program.signature.inputs_of("batch") if item.batch_dim is not None]


def _dim_as_long(item: Input, size: int) -> int | None:
    """Dim 1 where that has so many samples, else dim 0 (labels, one for each)."""
    return next((dim for dim in (1, 0) if item.shape[dim : dim + 1] == (size,)), None)


def _mixes(program: Program, dims: Mapping[str, int], size: int) -> bool:
    """Whether some op would mix samples if `dims`, by input, counted `size` of them."""
    signature = program.signature
    inputs = tuple(replace(item, batch_dim=dims.get(item.name)) if item.kind == "batch" else item for item in signature.inputs)
    # Which of their dims count samples was found for those that were guessed: here it is read off the graph.
    outputs = tuple(replace(item, batch_dim=None, is_whole=False) if item.kind == "output" else item for item in signature.outputs)
    other = with_batch(program.copy(signature=replace(signature, inputs=inputs, outputs=outputs)))
    number = next(number for number in range(2, size + 1) if size % number == 0)
    return bool(mixing(other, number) or undivided(other, number))


def _option(program: Program, dims: Mapping[str, int]) -> str:
    """As short as it can be: an int is for all inputs, and those that names leave out have no batch."""
    signature = program.signature
    if all(dims.get(item.name) == 1 for item in signature.inputs_of("batch") if item.shape):
        return "batch_dims=1"
    by_name = {signature.guessed[int(name)]: dim for name, dim in dims.items()}
    return f"batch_dims={by_name}"
