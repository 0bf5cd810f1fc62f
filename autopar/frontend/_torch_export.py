"""Private torch API behind what `torch.export` traces of forward: operands that ops give back, regions under `no_grad` or an autocast."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor

from autopar._torch import attribute_set, pytree, writes_operands
from autopar.ops.traits import CASTS_OR_NOTHING

# Of a node of an export: the op gave its operand back, and is there because it may make a copy of it where that has another dtype, or lies
# otherwise.
GIVEN_BACK = "given_back"
_GIVING_BACK = (*CASTS_OR_NOTHING, torch.ops.aten.contiguous, torch.ops.aten.ravel)


def operands_traced_as_they_are() -> AbstractContextManager[None]:
    """While this is entered, a tensor that an op gives back as it was given (dropout in evaluation, what `F.mse_loss` broadcasts) stays to
    a trace what it was before. To torch who reads it later reads what the op gave, which may be under `no_grad`.

    A cast to the dtype that it has, `x.float()`, gives a tensor of its own, `GIVEN_BACK`: an autocast that a trace does not run (of a GPU
    that is not there), or `precision=` may make another dtype of the operand. So does `x.contiguous()`: another input may lie otherwise.
    """
    call = proxy_tensor.proxy_call

    def traced(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        tracer = mode.tracer
        if func is torch.ops.aten.dropout.default and (args[1] == 0 or not args[2]):  # to a trace it is a copy
            return args[0]
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        slots: list[Any] = [proxy_tensor.get_proxy_slot(each, tracer, None) for each in given]
        result: Any = call(mode, func, pre_dispatch, args, kwargs)
        if writes_operands(func) or result is NotImplemented:
            return result
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
        for operand, slot in zip(given, slots, strict=True):
            made: Any = proxy_tensor.get_proxy_slot(operand, tracer, None)
            if slot is None or made is slot or not any(operand is each for each in results):
                continue
            proxy_tensor.set_proxy_slot(operand, tracer, slot)
            if result is operand and func.overloadpacket in _GIVING_BACK:
                with proxy_tensor.disable_proxy_modes_tracing(), torch.enable_grad():  # as what it shows has one, also under no_grad
                    result = torch.ops.aten.alias.default(operand)
                proxy_tensor.set_proxy_slot(result, tracer, made)
                made.proxy.node.meta[GIVEN_BACK] = True
            elif result is operand:
                tracer.graph.erase_node(made.proxy.node)
        return result

    return attribute_set(proxy_tensor, "proxy_call", traced)


def functions_not_looked_up() -> AbstractContextManager[None]:
    """While this is entered, Dynamo does not find out in which function a line of code is, which it tells a log that nobody reads: it would
    split each file of the model's code, and of torch's own, into its tokens."""

    def unknown(filename: str, lineno: int) -> None:
        return None

    return attribute_set(symbolic_convert, "get_funcname", unknown)


# What an export with `regions_traced` has where a region of forward begins or ends. The first has whether gradients are on, an autocast its
# device, dtype, and whether it is enabled and caches.
REGION_MARKS: dict[Any, str] = {
    torch._C._set_grad_enabled: "gradients",
    torch.amp.autocast_mode._enter_autocast: "autocast",
    torch.amp.autocast_mode._exit_autocast: "end of autocast",
}


@contextmanager
def regions_traced() -> Generator[None]:
    """While this is entered, `torch.export` leaves `REGION_MARKS` in its graph, and traces what is under an autocast in forward with the
    dtypes that it has there; but not on meta, where torch casts nothing.

    Torch makes a graph of its own of each region, and loses `no_grad` in an autocast. It traces as if no autocast were there: ops that take
    one dtype are given two then, and `x.float()` of what is bfloat16 seems to give `x`.
    """
    mode, entered, caches = proxy_tensor.PreDispatchTorchFunctionMode, list[torch.autocast](), torch.is_autocast_cache_enabled()
    function = mode.__torch_function__

    def called(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Python's own would give back what lies in order before anything of it is traced.
        func = torch.ops.aten.contiguous.default if func is torch.Tensor.contiguous else func
        node = function(self, func, types, args, kwargs)
        mark = REGION_MARKS.get(func)
        if mark == "autocast":
            entered.append(torch.autocast(*args))
            entered[-1].__enter__()
            torch.set_autocast_cache_enabled(False)  # copies of parameters that have no values
        elif mark == "end of autocast":
            entered.pop().__exit__(None, None, None)
        return node

    def kept(graph: GraphModule, signature: Any) -> Any:
        return graph, signature

    with (
        attribute_set(mode, "__torch_function__", called),
        attribute_set(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", kept),
        attribute_set(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", kept),
    ):
        try:
            yield
        finally:
            while entered:  # the trace ended in an error
                entered.pop().__exit__(None, None, None)
            torch.set_autocast_cache_enabled(caches)
