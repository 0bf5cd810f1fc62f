"""All private PyTorch API that the runtime uses, behind functions of our own. Works with torch 2.11 to 2.15."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import list_backends, lookup_backend
from torch._dynamo.exc import InvalidBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Placement, Shard, _dtensor_spec
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from autopar.errors import AutoparError

P = ParamSpec("P")
R = TypeVar("R")
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]

__all__ = [
    "AllocatorLog",
    "AsksToConvert",
    "Backend",
    "TorchDispatchMode",
    "all_gather_flat",
    "around_steps",
    "backend_named",
    "below_autograd",
    "copy_all",
    "flatten",
    "gathers_strided_shards",
    "hand_on_hooks",
    "has_distributed",
    "has_forward_pre_hooks",
    "has_gradient_hooks",
    "has_step_hooks",
    "has_values",
    "is_accumulating",
    "is_alone",
    "is_fake_mode_active",
    "is_made_like",
    "lies_as",
    "metadata_of",
    "not_compiled",
    "paths_of",
    "plain_parts",
    "reduce_scatter_flat",
    "registered_names",
    "shard",
    "scale_in_place",
    "share_contents",
    "storage_key",
    "truncated_normals_shown",
    "unflatten",
    "version_of",
    "with_lazy_signs",
    "with_metadata",
]


class AllocatorLog:
    """What the allocator of `device` takes and gives back while this is entered, in this thread, by torch's profiler: temporaries inside
    ops and what compiled code takes are among it.

    `marks` are (name, begin, end) of each span that `mark` began and ended; `events` are (time, bytes), times in nanoseconds, both in
    order. They are there once it is left.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device).type
        self._profile = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True)
        self.marks: list[tuple[str, int, int]] = []
        self.events: list[tuple[int, int]] = []

    @staticmethod
    def is_taken() -> bool:
        """Whether somebody's profiler runs already: there can be one."""
        return torch.autograd.profiler._is_profiler_enabled

    def __enter__(self) -> AllocatorLog:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        results: Any = self._profile.kineto_results
        found = results.events()
        memory = (each for each in found if each.name() == "[memory]" and each.device_type().name.lower() == self._device)
        self.events = sorted((each.start_ns(), each.nbytes()) for each in memory)
        spans = ((each.name(), each.start_ns(), each.end_ns()) for each in found if each.name().startswith(_MARK))
        self.marks = sorted(((name.removeprefix(_MARK), begin, end) for name, begin, end in spans), key=lambda mark: mark[1])

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A span of this name, to be entered and left."""
        return torch.autograd.profiler.record_function(f"{_MARK}{name}")


_MARK = "autopar memory "


class AsksToConvert(nn.Module):
    """A module that is asked, as a whole, before `.to`, `.float`, `.cuda` and their like convert what it has."""

    def _takes_conversion(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether `convert` is to be run over its tensors; to be overridden."""
        return True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        return super()._apply(fn, recurse) if self._takes_conversion(fn) else self


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which a compiled caller calls as it is."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def hand_on_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """The hooks on `old`'s gradient become `new`'s. Both share them: the handles that users have still remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, hooks)


def is_accumulating(leaf_node: Any) -> bool | None:
    """Whether the backward under way adds to the `.grad` of a leaf, of which this is the node behind it on the tape: `backward(inputs=...)`
    leaves leaves out. None where `autograd.grad` hands the gradient out."""
    try:
        return torch._C._will_engine_execute_node(leaf_node)
    except RuntimeError:
        return None


def has_gradient_hooks(owner: torch.Tensor | nn.Module) -> bool:
    """Whether something is called with gradients: of a tensor its own, of a module what comes back through it."""
    if isinstance(owner, torch.Tensor):  # asked of every parameter at every step
        return bool(owner._backward_hooks or owner._post_accumulate_grad_hooks)
    return bool(owner._backward_hooks or owner._backward_pre_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something of the user's is called around each step of this optimizer, or of any."""
    everywhere = {*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()} - {_before_step, _after_step}
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or everywhere)


_around_steps: list[tuple[Callable[..., torch.optim.Optimizer | None], Callable[..., None]]] = []


def around_steps(
    before: Callable[[torch.optim.Optimizer, bool], torch.optim.Optimizer | None],
    after: Callable[[torch.optim.Optimizer, torch.optim.Optimizer], None],
) -> None:
    """From now on, in this process, the optimizer that `before` gives steps in place of one that is asked to (None: that itself), and
    `after` is called with both. `before` is told whether there is a closure. What was asked for before is no longer done.

    Torch documents that such a hook may return other arguments of the step; that `self` is the first of them is its code.
    """
    if not _around_steps:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _around_steps[:] = [(before, after)]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own, *others = args
    if own is not optimizer or torch.compiler.is_compiling():
        return None
    ((before, _),) = _around_steps
    stands_in = before(optimizer, any(each is not None for each in (*others, *kwargs.values())))
    return None if stands_in is None else ((stands_in, *others), kwargs)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ((_, after),) = _around_steps
    if args[0] is not optimizer:
        after(optimizer, args[0])


def lies_as(tensor: Any, parameter: torch.Tensor) -> bool:
    """Whether these are DTensors of the same parts."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        return False
    one, other = tensor._spec, parameter._spec
    return one is other or (one.mesh, one.placements) == (other.mesh, other.placements)


def share_contents(module: nn.Module, model: nn.Module) -> None:
    """`module` gets the very dicts of `model`: each parameter, buffer, submodule, and hook of backward or of state dicts, of one is the
    other's, now and later."""
    module._parameters, module._buffers, module._modules = model._parameters, model._buffers, model._modules
    module._non_persistent_buffers_set = model._non_persistent_buffers_set
    for kind in ("backward", "backward_pre", "state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        vars(module)[f"_{kind}_hooks"] = vars(model)[f"_{kind}_hooks"]


def registered_names(module: nn.Module) -> set[str]:
    """The names of the parameters, buffers and submodules that `module` itself has, be they None."""
    return {*module._parameters, *module._buffers, *module._modules}


def has_forward_pre_hooks(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks)


def metadata_of(state: Any) -> Any:
    """What a state dict holds beside tensors, by path of the module: the versions of its format; empty of a plain dict."""
    return getattr(state, "_metadata", OrderedDict())


def with_metadata(state: Any, metadata: Any) -> Any:
    """`state`, which holds `metadata` from now on."""
    state._metadata = metadata
    return state


def version_of(tensor: torch.Tensor) -> int:
    """How often `tensor` was written in place; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there are numbers in `tensor`: it is neither on meta nor a fake tensor."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def is_fake_mode_active() -> bool:
    """Whether the caller stands in a fake mode: what is computed there has no values."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def backend_named(name: str) -> Backend:
    """The torch.compile backend called `name`. Raises `AutoparError`."""
    try:
        return lookup_backend(name)
    except InvalidBackend as error:
        known = ["eager", "aot_eager", *list_backends()]
        raise AutoparError(f"no torch.compile backend is called {name!r}: there are {', '.join(known)}, or pass a callable") from error


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested tuples, lists, dicts and registered classes, and the (hashable) structure."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return pytree.tree_unflatten(list(leaves), structure)


def paths_of(structure: Any) -> list[str]:
    """How the user reaches each leaf of `structure`: `.loss`, `['logits']`, `[1]`."""
    leaves = pytree.tree_unflatten([0] * structure.num_leaves, structure)
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(leaves)[0]]


def shard(dim: int, split_factor: int) -> Placement:
    """A DTensor placement that splits `dim` inside each of its `split_factor` equal outer pieces."""
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def gathers_strided_shards() -> bool:
    """Whether `DTensor.full_tensor` gathers a dim split inside its outer pieces; torch 2.11 raises unless another axis splits these.

    Later versions have this exception, and catch it themselves.
    """
    return hasattr(_dtensor_spec, "_StridedShardNotDecodableError")


def has_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def below_autograd() -> AbstractContextManager[None]:
    """While this is entered ops go straight to their kernels, past autograd, which has nothing to do where gradients are off: that takes
    tens of microseconds for an op that is written in Python. Compiled code of torch's own runs like this."""
    return torch._C._AutoDispatchBelowAutograd()


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part of `tensor`, off autograd's tape: `to_local` puts it there, which takes as long as a small op."""
    return tensor._local_tensor


def plain_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of each DTensor, without gradients of its own; another tensor as it is. At once for all parameters of a model:
    every step asks for them, and a call for each takes longer than what is done."""
    parts = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    return [part.detach() if part.requires_grad and part is not each else part for part, each in zip(parts, tensors, strict=True)]


def dtensor_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`local`, of the shape and dtype of this rank's part of `parameter`, as a DTensor that lies as it does: `from_local` without its
    checks, for what is made anew at every step. `DTensor.__init__`, which does nothing, takes as long as the rest together.

    Torch can neither save nor deep-copy one that is made of a view that begins within a storage, as gradients in buckets do: it is made of
    the parameter's part then, and holds the view."""
    part = parameter._local_tensor
    if not local.storage_offset() or part.storage_offset() or local.device != part.device:
        return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)
    made = DTensor.__new__(DTensor, part, parameter._spec, requires_grad=False)
    made._local_tensor = local
    return made


def is_made_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether `dtensor_like` made `tensor` for this parameter: shapes, dtypes and strides are equal."""
    return isinstance(tensor, DTensor) and isinstance(parameter, DTensor) and tensor._spec is parameter._spec


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, be they on meta; another tensor may get it once these are gone."""
    return tensor.untyped_storage()._cdata


def with_lazy_signs(tensor: torch.Tensor, is_conjugate: bool, is_negative: bool) -> torch.Tensor:
    """`tensor`, whose memory is read as it is, as a view with these bits: `x.conj()` and `x.conj().imag` leave the numbers and set them."""
    tensor = tensor.conj() if is_conjugate else tensor
    return torch.ops.aten._neg_view.default(tensor) if is_negative else tensor


@contextmanager
def truncated_normals_shown() -> Generator[None]:
    """While this is entered `trunc_normal_` of a tensor on meta, which torch 2.13 passes over, is seen to write it, and to read what it
    wrote."""
    name = "_no_grad_trunc_normal_"
    original = getattr(nn.init, name)

    def shown(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.copy_(tensor.normal_() * 1) if tensor.is_meta else original(tensor, *args, **kwargs)

    setattr(nn.init, name, shown)
    try:
        yield
    finally:
        setattr(nn.init, name, original)


def num_holders(tensor: torch.Tensor) -> int:
    """How many tensors and storages share the memory of `tensor`, this question included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def num_references(tensor: torch.Tensor) -> int:
    """How many hold `tensor` itself: Python, once, and whoever in C++."""
    return tensor._use_count()  # type: ignore[attr-defined]


_ALONE = num_holders(torch.empty(1))


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has its memory for itself: all of it, and no other tensor shares it."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) == _ALONE


def starts_backward(tensor: torch.Tensor) -> bool:
    """Whether a backward can start from `tensor`. A view made under `no_grad` of what requires a gradient says that it does."""
    return tensor.requires_grad and not (tensor.is_leaf and tensor._is_view())


def all_gather_flat(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launch an all-gather of 1-d tensors; torch 2.13 renamed the function and warns of the old name."""
    return _renamed("all_gather_single", "all_gather_into_tensor")(output, source, group=group, async_op=True)


def reduce_scatter_flat(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launch a summing reduce-scatter of 1-d tensors; renamed in torch 2.13 likewise."""
    return _renamed("reduce_scatter_single", "reduce_scatter_tensor")(output, source, group=group, async_op=True)


def _renamed(new: str, old: str) -> Callable[..., dist.Work]:
    return getattr(dist, new if hasattr(dist, new) else old)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch.ops.aten._foreach_copy_.default(list(targets), list(sources))


def scale_in_place(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """`tensors *= scale`, a tensor without dims, in one call. A scale of 1, which `loss.backward()` has, is no pass over them where
    looking at it costs nothing: on a GPU it would wait for all that is under way there."""
    if tensors and not (scale.device.type == "cpu" and scale.item() == 1):
        torch.ops.aten._foreach_mul_.Tensor(list(tensors), scale)
