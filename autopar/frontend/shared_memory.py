"""Tensors of a model that lie in one memory without being one tensor: what is written into one shows in the other, which programs, of which
every tensor is an input by itself, do not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import CaptureError, MeshError
from autopar.graph.overwrites import memory_of, statistics_of, writes, written_by
from autopar.ir.keys import SOURCE
from autopar.ir.program import Input, Program
from autopar.ir.source import WRAPPED

Named = Sequence[tuple[str, torch.Tensor]]


def refuse_shared_writes(program: Program, model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
    """Raise `CaptureError` where a FORWARD program writes into what a tensor that it also reads shares memory with. `constants` are tensors
    that the model holds beside its parameters and buffers."""
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False)) | dict(constants)
    inputs = [(item, node, values[item.name]) for item, node in program.named_inputs() if item.name in values and item.kind != "batch"]
    written = {memory: writer for writer in reversed(program.graph.nodes) for memory in _written(writer)}
    for item, node, value in inputs:
        if node not in written:
            continue
        for other, reader, shown in inputs:
            if reader.users and overlap(value, shown):
                raise _refused(item, other, written[node])


def refuse_shared_parameters(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
    """Raise `MeshError` where a parameter that trains lies in one memory with another tensor of the model: processes hold parts of it,
    elsewhere, so that the other would keep the values of now."""
    by_memory: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, each in (
        *model.named_parameters(),
        *model.named_buffers(),
        *((name.removeprefix(WRAPPED), each) for name, each in constants.items()),
    ):
        memory = _memory(each)
        if memory is not None:
            by_memory.setdefault(memory, []).append((name, each))
    for found in by_memory.values():
        for name, other in _sharing(found):
            raise MeshError(
                f"{name!r} and {other!r} lie in the same memory and are two tensors: processes hold parts of the parameter elsewhere, and "
                "the other would keep the values of now. Tie two parameters as one (head.weight = embedding.weight), read the parameter "
                "itself in forward, or give the other memory of its own (.clone())"
            )


def _written(writer: Node) -> Iterator[Node]:
    """The values into whose memory a call of a FORWARD program writes; of norms that track statistics no schema says so."""
    yield from map(memory_of, statistics_of(writer))
    if writer.op == "call_function" and writes(writer):
        yield memory_of(written_by(writer))


def _sharing(found: Named) -> Iterator[tuple[str, str]]:
    """Of tensors in one memory those that have an element in common with a parameter that trains, by name."""
    placed = sorted(((*_span(each), name, each) for name, each in found if each.numel()), key=lambda each: each[:2])
    for index, (_, end, name, each) in enumerate(placed):
        for start, _, other, shown in placed[index + 1 :]:
            if start >= end:
                break  # nor does any that begins later
            if overlap(each, shown):
                yield from (pair for first, pair in ((each, (name, other)), (shown, (other, name))) if _trains(first))


def _trains(value: torch.Tensor) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, which are not the same, have an element in common."""
    if one is other or not one.numel() or not other.numel():
        return False
    memory = _memory(one)
    if memory is None or memory != _memory(other):
        return False
    (begin, end), (start, stop) = _span(one), _span(other)
    if stop <= begin or end <= start:
        return False
    if one.dtype != other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    _elements(marks, one).fill_(True)
    return bool(_elements(marks, other).any())


def in_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, or have an element in common."""
    return one is other or overlap(one, other)


def _memory(value: torch.Tensor) -> int | None:
    """Which is that of a tensor of numbers side by side, as long as it is there; None of a sparse one."""
    return StorageWeakRef(value.untyped_storage()).cdata if value.layout is torch.strided else None


def _span(value: torch.Tensor) -> tuple[int, int]:
    """From which byte of its memory to which it lies."""
    begin = int(value.storage_offset())
    end = begin + 1 + sum(int(stride) * (int(size) - 1) for size, stride in zip(value.shape, value.stride(), strict=True))
    return begin * value.element_size(), end * value.element_size()


def _elements(marks: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Where the elements of `value` lie, each once."""
    shape = [size if stride else 1 for size, stride in zip(value.shape, value.stride(), strict=True)]
    return marks.as_strided(shape, value.stride(), value.storage_offset())


def _refused(item: Input, other: Input, writer: Node) -> CaptureError:
    place, shown = SOURCE.get(writer), other.name.removeprefix(WRAPPED)
    where = f"\n  where: {place.at}" if place is not None else ""
    return CaptureError(
        f"forward writes into the {item.kind} {item.name!r}, and the {other.kind} {shown!r}, which it reads, lies "
        f"in the same memory: in a program they are two tensors, of which one would stay as it was{where}\n"
        "  how to mend it: read both as one (self.a[:3] in forward, in place of a second buffer), or give one memory of its own (.clone())"
    )
