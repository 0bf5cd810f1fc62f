"""Contractions and attention in a lower dtype, everything that wants digits in float32."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar._torch import OpOverload, has_kernel, pytree, schema_of, writes_operands
from autopar.errors import AutoparError
from autopar.graph.autocast import NOTHING, Autocast, CastInsideError, Casts, CastsOfCalls, Region
from autopar.graph.emit import Emitter, tensor_of
from autopar.graph.fake_values import set_fake_values
from autopar.graph.overwrites import memory_of, writers_of, written_by
from autopar.ir.keys import EXACT, SOURCE
from autopar.ir.precision import MixedPrecision
from autopar.ir.program import Program
from autopar.ops.traits import CASTS

aten = torch.ops.aten

_LOW_FLOATS = (torch.float16, torch.bfloat16)
_FLOATS = (*_LOW_FLOATS, torch.float32)
# torch's autocast leaves them alone, so that kernels take operands of two dtypes; some releases have no list for the second.
_NORMS = frozenset({aten.batch_norm.default, aten.instance_norm.default, aten.rms_norm.default})
# They write the elements of one operand into another, and take no two dtypes.
_PLACING = frozenset(
    {
        aten.index_put.default, aten.index_put_.default, aten.index_add.default, aten.index_add_.default, aten.index_copy.default,
        aten.index_copy_.default, aten.scatter.src, aten.scatter_.src, aten.scatter_add.default, aten.scatter_add_.default,
        aten.scatter_reduce.two, aten.scatter_reduce_.two, aten.masked_scatter.default, aten.masked_scatter_.default,
        aten.slice_scatter.default, aten.select_scatter.default,
    }
)  # fmt: skip

# Kernels of these know no dtype below float32, which fake tensors do not say: of `linalg` all but products and norms.
_LOW_LINALG = (
    "cross",
    "diagonal",
    "matmul",
    "matrix_exp",
    "matrix_norm",
    "matrix_power",
    "multi_dot",
    "norm",
    "vander",
    "vecdot",
    "vector_norm",
)
_WIDE_KERNELS = frozenset(
    {
        "avg_pool3d", "cholesky", "cholesky_inverse", "cholesky_solve", "complex", "det", "geqrf", "logdet", "orgqr", "ormqr", "polar",
        "qr", "special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1", "special_erfcx",
        "special_log_ndtr", "special_ndtri", "special_zeta", "svd", "triangular_solve",
    }
)  # fmt: skip


@dataclass(frozen=True)
class CastToPrecision:
    """Casts by `precision`: the lists of torch's autocast on a GPU, on any device, and parameters cast where anything else reads them.

        linear(x, w)                  linear(x → bf16, w → bf16)
        embedding(w, ids)        →    embedding(w → bf16, ids)       what follows is bfloat16, too, down the residual stream
        layer_norm(h, w, b)           layer_norm(h → f32, w, b)      softmax, exp, pow, sum, losses likewise

    A parameter is cast once, where it lies, so that what is gathered of it is the lower dtype. What no parameter and no floating-point
    input has a part in (angles of rotary embeddings, masks) stays as it is, and so do calls of modules that are kept, under a
    disabled autocast, of a `torch.autograd.Function`, and of what forward writes into parameters alone: these get float32. So do
    calls that are on no list and take no lower dtype, or no two dtypes (transforms of Fourier, factorizations, quantiles, complex
    numbers). What is written into an operand is cast to that one's dtype.

    Reads: a FORWARD program as it was captured, SOURCE, EXACT. Writes: casts; `precision` and `reduce` of the program.
    Ensures: inputs and outputs have the dtypes that they had. Raises `AutoparError` for trainable parameters that are not float32, and for
    writes that a cast would lose.
    """

    precision: MixedPrecision | None
    name: str = "cast to precision"

    def apply(self, program: Program) -> Program:
        if self.precision is None:
            return program
        _require_masters(program)
        program = program.copy(precision=self.precision, reduce=self.precision.reduce)
        dtypes = [output.dtype for output in program.signature.outputs]
        before = frozenset(program.graph.nodes)
        regions = _regions(program, self.precision)
        set_fake_values(program, regions, [node for item, node in program.named_inputs() if item.kind == "parameter"])
        _require_own_memory(program, before)
        return _with_outputs_in(program, dtypes)


def _require_masters(program: Program) -> None:
    others = [item for item in program.signature.inputs_of("parameter") if item.requires_grad and item.dtype != torch.float32]
    if others:
        raise AutoparError(
            f"precision= computes with copies of float32 parameters, and {others[0].name!r}, one of {len(others)}, is {others[0].dtype}: "
            "call model.float() before, or leave precision= out for a model that is in a lower dtype itself"
        )


def _require_own_memory(program: Program, before: frozenset[Node]) -> None:
    """Raise where a call would write into a cast's copy: what it writes was to be seen elsewhere."""
    for writer in writers_of(program.graph):
        memory = memory_of(written_by(writer))
        if memory not in before and memory.target in CASTS:
            raise AutoparError(
                f"precision= would cast what {writer.target} writes into, and the write would be lost, at {SOURCE.get(writer)}. "
                "Write out of place (x = x.mul(2), torch.where), or name the module that makes the value in MixedPrecision(keep=[...]), too"
            )


def _regions(program: Program, precision: MixedPrecision) -> Mapping[Node, Region]:
    """By call what casts it."""
    low = _Low(Autocast("cuda", precision.param))
    exact = _Exact(Autocast("cuda", torch.float32))
    named, updates = list(program.named_inputs()), _of_written_parameters(program)
    learned = {node for item, node in named if item.kind == "parameter" or item.is_parameter}
    descends = learned | {node for item, node in named if item.kind == "batch" and _is_float(node)}
    regions: dict[Node, Region] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or descends.isdisjoint(node.all_input_nodes):
            continue
        descends.add(node)
        is_exact = node in EXACT or node in updates or not isinstance(node.target, OpOverload) or precision.keeps(SOURCE[node].module)
        regions[node] = exact if is_exact else low
    return regions


def _of_written_parameters(program: Program) -> set[Node]:
    """What nothing but parameters that forward writes comes of: 0.999 times a teacher's weight has no digits in a lower dtype."""
    written = {node for item, node in program.named_inputs() if item.is_parameter}
    found = {each for each in writers_of(program.graph) if memory_of(written_by(each)) in written}
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and node.users and found.issuperset(node.users):
            found.add(node)
    return found


def _is_float(node: Node) -> bool:
    return tensor_of(node).is_floating_point()


@dataclass(eq=False)
class _Exact(Region):
    """Calls in float32."""

    def casts_of(self, node: Node, args: Any, kwargs: Any, known: CastsOfCalls) -> Casts:
        return NOTHING if node.target in CASTS else _all_to(torch.float32, args, kwargs)


@dataclass(eq=False)
class _Low(Region):
    """Calls in the lower dtype, as far as they can be."""

    taken: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])

    def casts_of(self, node: Node, args: Any, kwargs: Any, known: CastsOfCalls) -> Casts:
        assert self.autocast is not None and isinstance(node.target, OpOverload)
        if node.target in _NORMS:
            return _all_to(torch.float32, args, kwargs)
        if node.target in _PLACING:
            return _all_to(args[0].dtype, args, kwargs)
        if writes_operands(node.target):
            written = _written(node.target, args, kwargs)
            return _all_to(written.dtype, args, kwargs) if written.is_floating_point() else NOTHING
        try:
            casts = known.of(node.target, args, kwargs, self.autocast)
        except RuntimeError:  # made of others that do not take the lower dtype, as transforms of Fourier are
            return _all_to(torch.float32, args, kwargs)
        except CastInsideError:  # one kernel on a GPU, whose operands autocast casts: LSTMs, cells of recurrent networks
            return _all_to(self.autocast.dtype, args, kwargs)
        if casts != NOTHING or has_kernel(node.target, "AutocastCUDA") or node.target in CASTS:
            return casts
        if node.target.namespace != "aten":
            return _all_to(self.autocast.dtype, args, kwargs)  # kernels of other libraries take no two dtypes
        leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
        masters = {place: self.autocast.dtype for place, leaf in enumerate(leaves) if self._is_master(leaf)}
        return Casts(masters) if self._takes(node.target, args, kwargs, masters) else _all_to(torch.float32, args, kwargs)

    def _takes(self, target: OpOverload, args: Any, kwargs: Any, casts: Mapping[int, torch.dtype]) -> bool:
        """Whether a call takes its operands, cast like this, each kind of call tried once: dtypes decide, and what promotes to what."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [leaf.to(casts[place]) if place in casts else leaf for place, leaf in enumerate(leaves)]
        if not any(isinstance(leaf, torch.Tensor) and leaf.dtype in _LOW_FLOATS for leaf in leaves):
            return True
        kinds = tuple((leaf.dtype, leaf.ndim) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        key = target, kinds, str(structure)
        if key not in self.taken:
            self.taken[key] = _runs(target, *pytree.tree_unflatten(leaves, structure))
        return self.taken[key]

    def _is_master(self, leaf: Any) -> bool:
        return isinstance(leaf, Node) and leaf in self.leaves and tensor_of(leaf).dtype == torch.float32


def _written(target: OpOverload, args: Any, kwargs: Any) -> torch.Tensor:
    """The operand that the call writes into."""
    named = dict(zip((each.name for each in schema_of(target).arguments), args, strict=False)) | dict(kwargs)
    return next(named[each.name] for each in schema_of(target).arguments if each.alias_info is not None and each.alias_info.is_write)


def _runs(target: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call knows the dtypes of its operands: some refuse low ones (`rfft`), some two that most promote (`lerp`)."""
    name = schema_of(target).name.removeprefix("aten::").removeprefix("_")
    if name in _WIDE_KERNELS or (name.startswith("linalg_") and name.removeprefix("linalg_") not in _LOW_LINALG):
        return False
    try:
        with torch.no_grad():
            target(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


def _all_to(dtype: torch.dtype, args: Any, kwargs: Any) -> Casts:
    """Every operand of at most 32 bits in `dtype`."""
    leaves = enumerate(pytree.tree_leaves((args, kwargs)))
    return Casts(
        {place: dtype for place, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype in _FLOATS and leaf.dtype != dtype}
    )


def _with_outputs_in(program: Program, dtypes: list[torch.dtype]) -> Program:
    results = list(program.results)
    for place, dtype in enumerate(dtypes):
        if tensor_of(results[place]).dtype != dtype:
            results[place] = Emitter(program.graph, program.graph.output_node(), results[place]).cast(results[place], dtype)
    program.graph.output_node().args = (tuple(results),)
    return program
