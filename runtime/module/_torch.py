"""Private PyTorch API by which DTensors go our way where torch's is wrong: its dispatch, its rules for views, its gathers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, _redistribute, debug
from torch.distributed.tensor import _api as _dtensor_api
from torch.distributed.tensor import _dispatch as _dtensor_dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _view_ops

from autopar._torch import is_fake

__all__ = [
    "collectives_taken_over",
    "data_taken_over",
    "draws_taken_over",
    "gathers_taken_over",
    "in_place_names",
    "is_in_backward",
    "lie_as",
    "lie_whole",
    "numbers_taken_over",
    "operations_taken_over",
    "rank_of",
    "ranks_of",
    "views_taken_over",
]


def rank_of(mesh: DeviceMesh) -> int:
    """The rank that made a mesh, which one that is read from a file remembers."""
    return mesh._rank


def ranks_of(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of a mesh; of a part of one, read from a file, those of the part in which this rank would be, or none."""
    try:
        return mesh.mesh
    except RuntimeError:
        return torch.empty((0,) * mesh.ndim, dtype=torch.int64)


def numbers_taken_over(number_of: Callable[[DTensor], torch.Tensor]) -> None:
    """From now on a DTensor of which a number is asked (`.item()`, `float()`, `bool()`) has that which `number_of` gives, where torch would
    give what this rank holds."""

    def given(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        return op_call(number_of(args[0]))

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = given


_GATHERS, _VIEWS = "_autopar_gathers", "_autopar_views"
_COLLECTIVES = (
    "allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ broadcast_ gather_ "
    "reduce_ reduce_scatter_ _reduce_scatter_base_ scatter_ send"
).split()
_DRAWS = (
    "normal_ uniform_ bernoulli bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_ "
    "rand_like randn_like randint_like native_dropout multinomial rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional"
).split()


def draws_taken_over(draw: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """From now on `draw` gives what random ops do to DTensors on a CPU, called with the op, its operands and its options."""
    handlers = DTensor._op_dispatcher._custom_op_handlers

    def given(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        if isinstance(args[0], DTensor) and args[0].device_mesh.device_type == "cpu":
            return draw(op_call, args, kwargs)
        handler = handlers.pop(op_call)  # torch has generators for the parts on other devices
        try:
            return op_call(*args, **kwargs)
        finally:
            handlers[op_call] = handler

    handlers.update(dict.fromkeys(_overloads(_DRAWS), given))


def _overloads(names: Iterable[str], space: Any = torch.ops.aten) -> Iterator[OpOverload]:
    """The ops of these names, each the very object that torch has in its tables: `packet.__getattr__` would make another one."""
    for name in names:
        packet = getattr(space, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            if not any(argument.is_out for argument in overload._schema.arguments):
                yield overload


def in_place_names() -> list[str]:
    """The ATen ops that write into their first operand, but for draws, what steps optimizers, and what torch has a way of its own for."""
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    found = [name for name in names if name.endswith("_") and not name.endswith("__") and name not in _DRAWS]
    plain = [name for name in found if name.startswith("_foreach_") or not name.startswith("_")]
    handled = DTensor._op_dispatcher._custom_op_handlers
    return sorted(name for name in plain if all(op._schema.is_mutable and op not in handled for op in _overloads([name])))


def is_in_backward() -> bool:
    """Whether a backward is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def lie_whole(tensor: DTensor) -> None:
    """Have every rank hold the sum or norm of which each holds a part; what is split stays so. Collective over its mesh."""
    words = [Replicate() if word.is_partial() else word for word in tensor.placements]
    with torch.no_grad():
        whole: Any = tensor.redistribute(placements=words)
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def lie_as(tensor: DTensor, words: Sequence[Placement]) -> None:
    """From now on the parts that ranks hold of `tensor` are what `words` say."""
    tensor._spec = DTensorSpec(tensor.device_mesh, tuple(words), tensor_meta=tensor._spec.tensor_meta)


def operations_taken_over(
    names: Iterable[str], see: Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
) -> None:
    """From now on `see` gives what the ops of these names do where DTensors are among their operands: called with the op, its operands, its
    options, and what does as torch does."""
    handlers = DTensor._op_dispatcher._custom_op_handlers

    def given(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        def torchs() -> Any:
            handlers.pop(op_call, None)  # not there while another thread is here
            try:
                return op_call(*args, **kwargs)
            finally:
                handlers[op_call] = given

        return see(op_call, args, kwargs, torchs)

    handlers.update(dict.fromkeys(_overloads(names), given))


def collectives_taken_over(refuse: Callable[[str], NoReturn]) -> None:
    """From now on `refuse` is called with the name of a collective of torch.distributed that is given a DTensor, which it does not know."""

    def given(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        refuse(op_call.__name__.split(".")[0].rstrip("_"))

    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(_overloads(_COLLECTIVES, torch.ops.c10d), given))


def gathers_taken_over(
    gather: Callable[..., tuple[torch.Tensor, Sequence[Placement]] | None], is_cut_from_whole: Callable[..., bool]
) -> None:
    """From now on a DTensor that torch lays out anew is first given to `gather`: a rank's part, the mesh, how it lies on it, and its shape.
    What that gives, if anything, and how that lies, is what torch goes on from. It cuts what shall lie as `is_cut_from_whole` says, of
    placements and the sizes of a mesh, from whole tensors."""
    torchs = _redistribute.redistribute_local_tensor
    if hasattr(torchs, _GATHERS):
        return

    def redistribute(part: torch.Tensor, current: DTensorSpec, target: DTensorSpec, **options: Any) -> torch.Tensor:
        is_other = current.placements != target.placements and not is_fake(part)
        found = gather(part, current.mesh, current.placements, current.shape) if is_other else None
        if found is not None:
            part, words = found
            current = DTensorSpec(current.mesh, tuple(words), tensor_meta=current.tensor_meta)
        if is_other and is_cut_from_whole(target.placements, current.mesh.shape):
            whole = DTensorSpec(current.mesh, (Replicate(),) * current.mesh.ndim, tensor_meta=current.tensor_meta)
            part, current = torchs(part, current, whole), whole
        return torchs(part, current, target, **options)

    setattr(redistribute, _GATHERS, True)
    modules: tuple[Any, ...] = _redistribute, _dtensor_dispatch, _dtensor_api  # each has it by name
    for module in modules:
        module.redistribute_local_tensor = redistribute


def views_taken_over(words_of: Callable[..., Sequence[Placement] | None]) -> None:
    """From now on a view of a DTensor that merges dims or cuts them lies as `words_of` says, if that says anything, of its placements, the
    sizes of the mesh, its shape, the view's, and the dims that stay as they are."""
    torchs: Any = _view_ops.propagate_shape_and_sharding
    if hasattr(torchs, _VIEWS):
        return

    def propagate(words: Sequence[Placement], shape: Sequence[int], rule: Sequence[Any], sizes: Sequence[int], *options: Any) -> Any:
        found = None
        if any(isinstance(each, (_view_ops.Flatten, _view_ops.Split)) for each in rule):
            kept = {each.input_dim for each in rule if isinstance(each, _view_ops.InputDim)}
            found = words_of(words, sizes, shape, [_size_of_dim(each, shape) for each in rule], kept)
        return torchs(words, shape, rule, sizes, *options) if found is None else (list(words), list(found))

    setattr(propagate, _VIEWS, True)
    _view_ops.propagate_shape_and_sharding = propagate
    debug._clear_sharding_prop_cache()


def _size_of_dim(rule: Any, shape: Sequence[int]) -> int:
    """The size of a dim of a view, which torch describes by dims of the operand; 0 of another description."""
    if isinstance(rule, _view_ops.InputDim):
        return shape[rule.input_dim]
    if isinstance(rule, _view_ops.Flatten):
        return math.prod(_size_of_dim(each, shape) for each in rule.input_dims)
    if isinstance(rule, _view_ops.Split):
        return rule.group_shape[rule.split_id]
    return int(isinstance(rule, _view_ops.Singleton))


def data_taken_over(part_of: Callable[[DTensor, Any], torch.Tensor | None]) -> None:
    """From now on a DTensor that is given other data (`p.data = x`) holds what `part_of` says of the two, if that is anything: torch takes
    the shape, and leaves the part that there was."""
    data: Any = torch.Tensor.data

    def give(tensor: DTensor, value: Any) -> None:
        part = part_of(tensor, value)
        data.__set__(tensor, value)
        if part is not None:
            tensor._local_tensor = part

    kind: Any = DTensor
    kind.data = property(data.__get__, give)
