"""The private PyTorch API that the cache of compiles uses: what of torch's state a capture could read, and fake tensors from numbers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._dynamo import trace_rules
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

OP_KINDS = (OpOverload, OpOverloadPacket)


@contextmanager
def traced_codes() -> Generator[list[list[CodeType]]]:
    """While this is entered, the codes that Dynamo traces come into the lists that it yields."""
    found: list[list[CodeType]] = []
    original = TracingContext.__init__

    def init(self: TracingContext, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.append(self.traced_code)

    TracingContext.__init__ = init
    try:
        yield found
    finally:
        TracingContext.__init__ = original


def modes_active() -> int:
    """How many modes of dispatch and of torch functions are entered."""
    return _len_torch_dispatch_stack() + _len_torch_function_stack()


def is_treated_apart(function: object) -> bool:
    """Whether the user has told Dynamo to call `function` as it is, or not to look at it."""
    return any(
        ask(function)
        for ask in (trace_rules.is_callable_allowed, trace_rules.is_nonstrict_trace_callable, trace_rules.is_callable_disallowed)
    )


def kernels_replaced() -> list[str]:
    """Kernels of torch's own ops that somebody has registered from Python."""
    return sorted(str(each) for each in getattr(torch.library, "_impls", ()) if str(each).startswith("aten/"))


def tracing_options() -> str:
    """The options of Dynamo and AOTAutograd, in words."""
    return repr([_ordered(config.get_config_copy()) for config in (dynamo_config, functorch_config)])


def _ordered(value: Any) -> Any:
    """In words; without the order of sets, which is another one in each process."""
    if isinstance(value, dict):
        return sorted(
            (repr(key), _ordered(each)) for key, each in value.items() if not str(key).startswith(("_save_config", "_cache_config"))
        )
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else repr(value)


def flags() -> dict[str, Any]:
    """What torch has been told for the whole process that a trace could read, but for the modes."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda")
        ],
        "sdpa": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        "matmul": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cuda.matmul.allow_fp16_reduced_precision_reduction),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "opt_einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "threads": torch.get_num_threads(),
        "cuda": (torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count()),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "swap": (torch.__future__.get_overwrite_module_params_on_conversion(), torch.__future__.get_swap_module_params_on_conversion()),
        "world": torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else None,
    }


def flattening_of(kind: type) -> tuple[Any, ...]:
    """The functions by which torch takes objects of a class apart and puts them together; none for what it knows nothing of."""
    found = pytree.SUPPORTED_NODES.get(kind)
    return () if found is None else (found.flatten_fn, found.unflatten_fn)


def parts_of_structure(spec: pytree.TreeSpec) -> tuple[Any, Any, list[pytree.TreeSpec]]:
    """Type, context and children; the type of a leaf is None."""
    return spec.type, spec._context, spec._children


def structure_of(kind: Any, context: Any, children: list[pytree.TreeSpec]) -> pytree.TreeSpec:
    return pytree.TreeSpec(kind, context, children)


def structure_of_leaf() -> pytree.TreeSpec:
    return pytree.tree_structure(0)


def memory(num_bytes: int) -> torch.Tensor:
    """Memory without values, of which `fake_in` makes tensors."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def fake_in(
    mode: FakeTensorMode,
    base: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A fake tensor of `mode` in the memory `base`, as if on `device`."""
    inner = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), offset, tuple(size), tuple(stride))
    return FakeTensor(mode, inner, device)
