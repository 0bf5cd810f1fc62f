"""What a call passes: its leaves by name, which of their dims is the batch, and whether they can be run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.driver.options import BatchDims, BatchOfFirst
from autopar.errors import InputError
from autopar.ir.leaf_names import leaf_names
from autopar.ir.mesh import Mesh
from autopar.runtime._torch import flatten, unflatten
from autopar.runtime.module.object_inputs import as_structure, holds_tensors


@dataclass(frozen=True)
class Lengths:
    """Of a call whose `inputs`, by flat index, are padded in `dim`: how long they were on this rank, on the ranks of the shortest batch and
    of the longest, and how long they are."""

    dim: int
    inputs: tuple[int, ...]
    own: int
    shortest: int
    longest: int
    padded: int


@dataclass(frozen=True)
class CallInputs:
    """The flat leaves of `(args, kwargs)`, keyword arguments sorted by name, with the names that a user would use. The batch dims by flat
    index are known where these are a share of what was given, and `lengths` where they are padded."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any
    dims: Mapping[int, int] | None = None
    lengths: Lengths | None = None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallInputs:
        kwargs = dict(sorted(kwargs.items()))
        leaves, structure = flatten((args, kwargs))
        leaves = [leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in leaves]  # torch computes alike with Python's
        return CallInputs(tuple(leaf_names(args, kwargs)), tuple(leaves), structure)

    @property
    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Flat index, name and value of every tensor."""
        for index, (name, leaf) in enumerate(zip(self.names, self.leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                yield index, name, leaf

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The key without shapes."""
        return (self.structure, *(_leaf_kind(leaf) for leaf in self.leaves))

    def other_sizes(self, dims: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
        """Of each tensor the sizes of all dims but the one that `dims` names by its flat index: equal on ranks with unequal shares."""
        return tuple(
            tuple(size for dim, size in enumerate(tensor.shape) if index not in dims or dim != dims[index] % tensor.ndim)
            for index, _, tensor in self.tensors
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one program serves, as far as inputs go."""
        dims = () if self.dims is None else tuple(sorted(self.dims.items()))
        return (self.structure, *(_leaf_key(leaf) for leaf in self.leaves), *dims)

    def call(
        self, change: Callable[[int, torch.Tensor], torch.Tensor] = lambda index, tensor: tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with every tensor replaced by `change(flat index, tensor)`."""
        leaves = [change(index, leaf) if isinstance(leaf, torch.Tensor) else leaf for index, leaf in enumerate(self.leaves)]
        return unflatten(leaves, self.structure)

    def share(self, dims: Mapping[int, int], place: int, number: int) -> CallInputs:
        """The `place`-th of `number` shares of the global batch, as equal as they can be."""
        leaves = list(self.leaves)
        for index, _, tensor in self.tensors:
            if index in dims:
                leaves[index] = tensor.tensor_split(number, dims[index])[place]
        return CallInputs(self.names, tuple(leaves), self.structure, dims)


def _leaf_key(leaf: Any) -> Any:
    return (leaf.shape, _leaf_kind(leaf)) if isinstance(leaf, torch.Tensor) else _leaf_kind(leaf)


def _leaf_kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        device = "cpu" if leaf.is_meta else leaf.device.type  # not the index: it is each rank's own
        return (leaf.dtype, device, leaf.requires_grad)
    return (type(leaf), repr(leaf))


def batch_dims_of(inputs: CallInputs, batch_dims: BatchDims) -> dict[int, int]:
    """The batch dim of each tensor that has one, by flat index.

    An int: that dim of every tensor. A mapping: from an input's name, or that of the argument it is nested in, to its dim; unnamed
    inputs have none. Raises `InputError` for names and dims that there are not, and for a mapping of inputs without one that leaves out
    others: nothing would be split.
    """
    if inputs.dims is not None:
        return dict(inputs.dims)
    tensors = [(index, name, tensor) for index, name, tensor in inputs.tensors if tensor.ndim]
    if isinstance(batch_dims, BatchOfFirst):
        first = batch_dims.first(name for _, name, _ in tensors)
        length = next((tensor.shape[0] for _, name, tensor in tensors if name == first), 0)
        return {index: 0 for index, _, tensor in tensors if tensor.shape[0] == length}
    if isinstance(batch_dims, int):
        return {index: _dim_of(batch_dims, tensor, name) for index, name, tensor in tensors}
    unknown = [given for given in batch_dims if not any(_covers(given, name) for name in inputs.names)]
    if unknown:
        raise InputError(f"batch_dims names {unknown[0]!r}, which is no input of this call; its inputs are {', '.join(inputs.names)}")
    left_out = next((name for _, name, _ in tensors if innermost(batch_dims, name) is None), None)
    if left_out is not None and batch_dims and all(dim is None for dim in batch_dims.values()):
        raise InputError(
            f"batch_dims={dict(batch_dims)!r} stands in place of the default and leaves out {left_out}, so that no input would have "
            f"a batch dim: name those that have one, batch_dims={{{left_out!r}: 0, …}}; or all inputs with None, where none has"
        )
    found: dict[int, int] = {}
    for index, name, tensor in tensors:
        given = innermost(batch_dims, name)
        dim = None if given is None else batch_dims[given]
        if dim is not None:
            found[index] = _dim_of(dim, tensor, name)
    return found


def _dim_of(dim: int, tensor: torch.Tensor, name: str) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise InputError(
            f"batch_dims says that dim {dim} of {name} counts samples, and its shape is {tuple(tensor.shape)}; give its batch dim by name, "
            f"batch_dims={{{name!r}: 0, …}}, or None where it has none"
        )
    return dim % tensor.ndim


def innermost(given: Iterable[str], name: str) -> str | None:
    """Which of the names `given` stands for an input: its own `name`, else that of the innermost argument that it is nested in."""
    return max((each for each in given if _covers(each, name)), key=len, default=None)


def _covers(given: str, name: str) -> bool:
    return name == given or name.startswith((f"{given}[", f"{given}."))


def check_inputs(inputs: CallInputs, dims: Mapping[int, int], device: torch.device, *, is_virtual: bool) -> None:
    """Raise `InputError` with every reason why these inputs cannot run: device, layout, an empty batch, gradients asked for, objects.

    For virtual ranks what is on meta is planned with: see `input_values.py` for calls. The share of a real rank may be empty.
    """
    problems = []
    for index, name, tensor in inputs.tensors:
        is_planned = is_virtual and "meta" in (tensor.device.type, device.type)
        if tensor.device.type != device.type and tensor.ndim and not is_planned:
            problems.append(f"{name!r} is on {tensor.device}, the parameters are on {device}: pass {name}.to({str(device)!r})")
        if tensor.layout is not torch.strided:
            mend = f"pass {name}.to_dense(), or its indices and values, to compute with index_add or scatter_add over them"
            mend = f"pass {name}.to_padded_tensor(0.0), and a mask" if tensor.is_nested else mend
            problems.append(f"{name!r} is of layout {tensor.layout}, of which nothing is known that could be split: {mend}")
        if tensor.requires_grad and torch.is_grad_enabled():
            problems.append(
                f"{name!r} requires grad, but gradients are computed for parameters only: pass {name}.detach(), or, where what made it is "
                "trained as well, put both into one module"
            )
        if index in dims and is_virtual and tensor.shape[dims[index]] == 0:
            problems.append(f"{name!r} has no samples (shape {list(tensor.shape)}): pass at least one")
    problems += [as_structure(name, leaf) for name, leaf in zip(inputs.names, inputs.leaves, strict=True) if holds_tensors(leaf)]
    if problems:
        raise InputError("the inputs of this call cannot run on the mesh:\n  " + "\n  ".join(problems))


def global_call(inputs: CallInputs, dims: Mapping[int, int], sizes: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with the global batch's shapes, from one rank's share: values are uninitialised and take no memory that is not touched.

    `sizes` are those of the global batch, by flat index.
    """

    def grown(index: int, tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if index in dims:
            shape[dims[index]] = sizes[index]
        return torch.empty(shape, dtype=tensor.dtype)

    return inputs.call(grown)


def check_replicas(inputs: CallInputs, dims: Mapping[int, int], mesh: Mesh, gather: Callable[..., Sequence[Any]]) -> None:
    """Compare by checksum what ranks must pass alike; collective.

    Inputs with a batch dim must agree among ranks at equal places along dp, others among all. Raises `InputError` on
    every rank, naming the inputs and two ranks.
    """
    mine = {index: checksum(tensor) for index, _, tensor in inputs.tensors}
    everyone = gather(mine, "a comparison of the ranks' inputs")
    problems = []
    for index, name, _ in inputs.tensors:
        seen: dict[int, int] = {}
        for rank, sums in enumerate(everyone):
            place = mesh.index(rank, mesh.parts("dp")) if index in dims else 0
            other = seen.setdefault(place, rank)
            if sums[index] != everyone[other][index]:
                where = "the same share of the batch" if index in dims else "the same value, since it has no batch dim"
                problems.append(f"{name!r} differs between ranks {other} and {rank}, which must pass {where}")
                break
    if problems:
        raise InputError(
            "ranks pass different replicated inputs:\n  " + "\n  ".join(problems) + "\n  (if a dim is the batch, say so by batch_dims=)"
        )


def check_global(inputs: CallInputs, gather: Callable[..., Sequence[Any]]) -> None:
    """Compare by checksum what all ranks pass of the global batch; collective. Raises `InputError` on every rank."""
    everyone = gather({index: checksum(tensor) for index, _, tensor in inputs.tensors}, "a comparison of the ranks' batches")
    for index, name, _ in inputs.tensors:
        other = next((rank for rank, sums in enumerate(everyone) if sums[index] != everyone[0][index]), None)
        if other is not None:
            raise InputError(
                f"a flat mesh takes the global batch on every rank, and {name!r} differs between ranks 0 and {other}: pass the same batch "
                "everywhere (no DistributedSampler, one seed for all loaders), or a mesh with named axes and each rank's share"
            )


def checksum(tensor: torch.Tensor) -> str:
    """Of shape, dtype and bytes."""
    data = tensor.detach().cpu().contiguous().view(-1)
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if data.numel():
        digest.update(memoryview(data.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # numpy is typed for Python 3.12
    return digest.hexdigest()
