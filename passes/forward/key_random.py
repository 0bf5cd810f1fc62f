"""Random ops draw by (seed, step, site, logical position): the same on any mesh, and in any repetition.

The numbers differ from eager's, which come from a generator whose state depends on how many draws went before.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.errors import CaptureError
from autopar.graph.draws import MOST_INTEGERS, Draws
from autopar.graph.emit import Emitter, replace, tensor_of
from autopar.ir.arguments import all_named, int_at
from autopar.ir.keys import SITE, SOURCE, Site
from autopar.ir.program import Input, Program
from autopar.kernels.attention import attention
from autopar.ops.rules.labels import argument
from autopar.passes.forward.drawn_choices import permutation, picks
from autopar.passes.forward.recurrent_layers import RECURRENT, by_layers, num_layers_with_dropout

aten = torch.ops.aten

_RANDOM_KEY = "random_key"
# Where attention takes what it draws from.
_DRAWS = slice(6, 9)
# λα of SELU.
_SATURATION = 1.7580993408473766
_NORMALS = (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float)
_INTEGERS = (aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype)
Lowered = Node | tuple[Node, ...]


@dataclass(frozen=True)
class KeyRandom:
    """Dropout and random ops become integer arithmetic on positions (`autopar/graph/draws.py`).

    Reads: a FORWARD program; attention's dropout as `UnifyAttention` and `FuseAttention` leave it.
    Writes: plain ATen ops in the place of random ones; a recurrent network that drops between its layers as one call a layer; positions
        and words into attention, which draws by itself; and, if anything is drawn, one more input, the last, of kind "random_key": int64,
        0-d, in [0, 2**62), mixed from seed and step by `autopar.runtime.execute.random_key`. Sites have the numbers that `number_sites`
        gave them; those without one follow, in graph order.
    Ensures: no op draws from a generator. Dropout in evaluation, or of probability 0, is gone. Raises `CaptureError` naming every
        random op that cannot be keyed.
    """

    name: str = "key random"

    def apply(self, program: Program) -> Program:
        program = program.copy()
        for node in [node for node in program.graph.nodes if node.target in _DROPOUTS and not _drops(node)]:
            _replace(node, _kept(node))
        sites = [node for node in program.graph.nodes if _is_random(node)]
        _refuse({node: why for node in sites if (why := _why_not(node)) is not None})
        if not sites:
            return program
        program, key = _with_random_key(program)
        numbers = _numbers(sites)
        draws = Draws(program.graph, key, max(number + _num_streams(node) for node, number in numbers.items()))
        for node in sites:
            site, emit = _SITES[node.target], Emitter(program.graph, before=node)
            draws.begin(numbers[node])
            by = site.lower(draws, emit, node)
            _replace(node, emit.call(aten.copy_.default, node.args[0], by) if site.in_place else by)
        return program


def number_sites(program: Program) -> Program:
    """`program`, as it was captured, with a SITE on every op that draws: its number is its own, whatever is fused later."""
    drawing = [node for node in program.graph.nodes if _is_random(node) and (node.target not in _DROPOUTS or _drops(node))]
    number = 0
    for node in drawing:
        SITE[node] = Site(number)
        number += _num_streams(node)
    return program


def _num_streams(node: Node) -> int:
    """How many independent streams of numbers an op that draws takes; one of which nobody has said how counts as one."""
    return _SITES[node.target].num_streams(node) if node.target in _SITES else 1


def _numbers(sites: Sequence[Node]) -> dict[Node, int]:
    known = {node: SITE[node].number for node in sites if node in SITE}
    following = max((number + _num_streams(node) for node, number in known.items()), default=0)
    numbers: dict[Node, int] = {}
    for node in sites:
        numbers[node] = known.get(node, following)
        following += 0 if node in known else _num_streams(node)
    return numbers


@dataclass(frozen=True)
class _Site:
    """How a random op is lowered, how many independent streams a call of it takes, and whether its operand is overwritten."""

    lower: Callable[[Draws, Emitter, Node], Lowered]
    num_streams: Callable[[Node], int] = lambda _: 1
    in_place: bool = False


def _drops(node: Node) -> bool:
    """Whether a dropout is one: in training, with a probability above 0."""
    return argument(node, 2, "train") is not False and argument(node, 1, "p") > 0.0


def _kept(node: Node) -> Lowered:
    value = node.args[0]
    assert isinstance(value, Node)
    if node.target is not aten.native_dropout.default:
        return value
    return value, Emitter(node.graph, before=node).call(aten.ones_like.default, value, dtype=torch.bool)


def _is_random(node: Node) -> bool:
    if node.target is attention:
        return bool(node.kwargs["keep_below"]) and node.args[_DRAWS] == (None, None, None)
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is aten.scaled_dot_product_attention.default:
        return argument(node, 4, "dropout_p", 0.0) > 0.0
    if node.target in RECURRENT:
        return num_layers_with_dropout(node) > 0
    return node.target not in (aten.rrelu.default, aten.rrelu_.default) or bool(argument(node, 3, "training", False))


def _why_not(node: Node) -> str | None:
    """Why the draws of `node` cannot be keyed, if they cannot; "" where nobody has said how."""
    if node.target not in _SITES:
        return ""
    if node.target in _INTEGERS:
        low, high = _range(node)
        if not low < high:
            return f"from {low} to below {high}, which is no integer"
        if high - 1 > _largest(tensor_of(node).dtype):
            return f"up to {high - 1}, which {tensor_of(node).dtype} does not hold"
        return f"of {high - low} integers, where at most 2**31 are told apart" if high - low > MOST_INTEGERS else None
    value = node.meta["val"]
    is_complex = isinstance(value, torch.Tensor) and value.is_complex() and node.target not in _DROPOUTS
    return f"of {value.dtype}, where draws are real numbers" if is_complex else None


def _refuse(reasons: Mapping[Node, str]) -> None:
    if reasons:
        lines = "\n".join(
            f"  {node.target} at {SOURCE.get(node) or '(no source line)'}{why and ', ' + why}" for node, why in reasons.items()
        )
        raise CaptureError(
            f"the draws of these ops cannot be keyed by position:\n{lines}\n"
            "  how to mend it: use dropout, rand, randn, randint, randperm, bernoulli, multinomial, normal, uniform_, exponential_, "
            "geometric_, cauchy_ or log_normal_, or draw outside of forward"
        )


def _with_random_key(program: Program) -> tuple[Program, Node]:
    graph = program.graph
    like = next(tensor_of(node) for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        key = graph.placeholder(_RANDOM_KEY)
    key.meta["val"] = like.new_empty((), dtype=torch.int64)
    inputs = (*program.signature.inputs, Input("random_key", _RANDOM_KEY, (), torch.int64))
    return dataclasses.replace(program, signature=dataclasses.replace(program.signature, inputs=inputs)), key


def _replace(node: Node, by: Lowered) -> None:
    if isinstance(by, Node):
        replace(node, by)
        return
    for user in list(node.users):
        assert user.target is operator.getitem, user.format_node()
        replace(user, by[int_at(user, 1)])
    node.graph.erase_node(node)


def _dropped(emit: Emitter, value: Node, probability: float, mask: Node) -> Node:
    """value · mask / (1 − p). The mask stays bool: a byte per element is what the backward keeps of it."""
    scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    return emit.call(aten.mul.Tensor, emit.call(aten.mul.Tensor, value, mask), scale)


def _dropout(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _drop(draws, emit, argument(node, 0), argument(node, 1, "p"))


def _drop(draws: Draws, emit: Emitter, value: Node, probability: float) -> Node:
    return _dropped(emit, value, probability, draws.mask(emit, tensor_of(value).shape, 1.0 - probability))


def _recurrent(draws: Draws, emit: Emitter, node: Node) -> tuple[Node, ...]:
    """Drops what each layer but the last hands to the next."""
    return by_layers(emit, node, lambda value: _drop(draws, emit, value, all_named(node)["dropout"]))


def _native_dropout(draws: Draws, emit: Emitter, node: Node) -> tuple[Node, Node]:
    value, probability = argument(node, 0), argument(node, 1, "p")
    mask = draws.mask(emit, tensor_of(value).shape, 1.0 - probability)
    return _dropped(emit, value, probability, mask), mask


def _feature_dropout(draws: Draws, emit: Emitter, node: Node) -> Node:
    """Drops whole channels."""
    value, probability = argument(node, 0), argument(node, 1, "p")
    return _dropped(emit, value, probability, draws.mask(emit, _channels(node), 1.0 - probability))


def _channels(node: Node) -> list[int]:
    shape = tensor_of(node).shape
    return [*shape[:2], *(1 for _ in shape[2:])]


def _alpha_dropout(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _saturated(emit, node, draws.mask(emit, tensor_of(node).shape, 1.0 - argument(node, 1, "p")))


def _feature_alpha_dropout(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _saturated(emit, node, draws.mask(emit, _channels(node), 1.0 - argument(node, 1, "p")))


def _saturated(emit: Emitter, node: Node, mask: Node) -> Node:
    """What is dropped becomes SELU's limit −λα, then all is scaled and shifted to mean 0 and variance 1 (Klambauer et al., Self-normalizing
    neural networks, section 2); all zeros where all is dropped, as torch has it."""
    value, probability = argument(node, 0), argument(node, 1, "p")
    scale = ((1.0 + _SATURATION**2 * probability) * (1.0 - probability)) ** -0.5 if probability < 1.0 else 0.0
    kept = emit.call(aten.mul.Tensor, emit.call(aten.mul.Tensor, value, mask), scale)
    limit = emit.call(aten.mul.Tensor, emit.cast(mask, tensor_of(value).dtype), _SATURATION * scale)
    return emit.call(aten.add.Tensor, kept, emit.call(aten.sub.Tensor, limit, _SATURATION * scale * (1.0 - probability)))


def _rrelu(draws: Draws, emit: Emitter, node: Node) -> Node:
    """Each number that is not above 0 has a slope of its own."""
    value, low, high = argument(node, 0), argument(node, 1, "lower", 1 / 8), argument(node, 2, "upper", 1 / 3)
    slopes = _affine(emit, _uniform(draws, emit, node), high - low, low)
    return emit.call(aten.where.self, emit.call(aten.gt.Scalar, value, 0), value, emit.call(aten.mul.Tensor, value, slopes))


def _attention(draws: Draws, emit: Emitter, node: Node) -> Node:
    query, key = tensor_of(node.args[0]), tensor_of(node.args[1])
    shape, site = [*query.shape[:3], key.shape[2]], SITE.get(node)
    strides = site.strides if site is not None else None
    positions = draws.positions(emit, shape) if strides is None else draws.strided_positions(emit, shape, strides)
    return emit.call(attention, *node.args[: _DRAWS.start], *positions, **node.kwargs)


def _uniform(draws: Draws, emit: Emitter, node: Node) -> Node:
    return draws.uniform(emit, tensor_of(node).shape, tensor_of(node).dtype)


def _uniform_in_place(draws: Draws, emit: Emitter, node: Node) -> Node:
    low, high = argument(node, 1, "from", 0.0), argument(node, 2, "to", 1.0)
    return _affine(emit, _uniform(draws, emit, node), high - low, low)


def _normal(draws: Draws, emit: Emitter, node: Node) -> Node:
    return draws.normal(emit, tensor_of(node).shape, tensor_of(node).dtype)


def _normal_in_place(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _affine(emit, _normal(draws, emit, node), argument(node, 2, "std", 1.0), argument(node, 1, "mean", 0.0))


def _exponential(draws: Draws, emit: Emitter, node: Node) -> Node:
    draw = draws.exponential(emit, tensor_of(node).shape, tensor_of(node).dtype)
    return emit.call(aten.mul.Tensor, draw, 1.0 / argument(node, 1, "lambd", 1.0))


def _affine(emit: Emitter, value: Node, scale: float, shift: float) -> Node:
    return emit.call(aten.add.Tensor, emit.call(aten.mul.Tensor, value, scale), shift)


def _normal_around(draws: Draws, emit: Emitter, node: Node) -> Node:
    """`torch.normal(mean, std)`, which passes no gradient to either."""
    draw, named = _normal(draws, emit, node), all_named(node)
    mean, std = (emit.call(aten.detach.default, each) if isinstance(each, Node) else each for each in (named["mean"], named["std"]))
    scaled = emit.call(aten.mul.Tensor, draw, std)
    return emit.cast(emit.call(aten.add.Tensor, scaled, mean), tensor_of(node).dtype)


def _log_normal(draws: Draws, emit: Emitter, node: Node) -> Node:
    draw = draws.normal(emit, tensor_of(node).shape, _exact(node))
    return emit.call(aten.exp.default, _affine(emit, draw, argument(node, 2, "std", 2.0), argument(node, 1, "mean", 1.0)))


def _cauchy(draws: Draws, emit: Emitter, node: Node) -> Node:
    angles = _affine(emit, draws.uniform(emit, tensor_of(node).shape, _exact(node)), math.pi, -0.5 * math.pi)
    return _affine(emit, emit.call(aten.tan.default, angles), argument(node, 2, "sigma", 1.0), argument(node, 1, "median", 0.0))


def _exact(node: Node) -> torch.dtype:
    """What is drawn in where digits count; the result is rounded once."""
    return torch.float64 if tensor_of(node).dtype == torch.float64 else torch.float32


def _geometric(draws: Draws, emit: Emitter, node: Node) -> Node:
    """How many trials it takes: an exponential number, rounded up."""
    draw = draws.exponential(emit, tensor_of(node).shape, _exact(node))
    trials = emit.call(aten.ceil.default, emit.call(aten.mul.Tensor, draw, -1.0 / math.log1p(-argument(node, 1, "p"))))
    return emit.cast(trials, tensor_of(node).dtype)


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _range(node: Node) -> tuple[int, int]:
    """The lowest integer, and the one above the highest."""
    named = all_named(node)
    return named.get("low", 0), named["high"]


def _integer(draws: Draws, emit: Emitter, node: Node) -> Node:
    return emit.cast(draws.integer(emit, tensor_of(node).shape, *_range(node)), tensor_of(node).dtype)


def _bernoulli(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _bernoulli_of(draws, emit, node, argument(node, 0))


def _bernoulli_tensor(draws: Draws, emit: Emitter, node: Node) -> Node:
    return _bernoulli_of(draws, emit, node, argument(node, 1, "p"))


def _bernoulli_number(draws: Draws, emit: Emitter, node: Node) -> Node:
    return emit.cast(draws.mask(emit, tensor_of(node).shape, argument(node, 1, "p", 0.5)), tensor_of(node).dtype)


def _bernoulli_of(draws: Draws, emit: Emitter, node: Node, probabilities: Node) -> Node:
    dtype = torch.float64 if tensor_of(probabilities).dtype == torch.float64 else torch.float32
    draw = draws.uniform(emit, tensor_of(node).shape, dtype)
    return emit.cast(emit.call(aten.lt.Tensor, draw, probabilities), tensor_of(node).dtype)


_DROPOUTS: dict[object, _Site] = {
    aten.dropout.default: _Site(_dropout),
    aten.dropout_.default: _Site(_dropout, in_place=True),
    aten.native_dropout.default: _Site(_native_dropout),
    aten.feature_dropout.default: _Site(_feature_dropout),
    aten.feature_dropout_.default: _Site(_feature_dropout, in_place=True),
    aten.alpha_dropout.default: _Site(_alpha_dropout),
    aten.alpha_dropout_.default: _Site(_alpha_dropout, in_place=True),
    aten.feature_alpha_dropout.default: _Site(_feature_alpha_dropout),
    aten.feature_alpha_dropout_.default: _Site(_feature_alpha_dropout, in_place=True),
}
_SITES: dict[object, _Site] = _DROPOUTS | {
    attention: _Site(_attention),
    **dict.fromkeys(RECURRENT, _Site(_recurrent, num_layers_with_dropout)),
    aten.rand.default: _Site(_uniform),
    aten.rand_like.default: _Site(_uniform),
    aten.uniform_.default: _Site(_uniform_in_place, in_place=True),
    aten.randn.default: _Site(_normal, lambda _: 2),
    aten.randn_like.default: _Site(_normal, lambda _: 2),
    aten.normal_.default: _Site(_normal_in_place, lambda _: 2, in_place=True),
    aten.exponential_.default: _Site(_exponential, in_place=True),
    aten.rrelu.default: _Site(_rrelu),
    aten.rrelu_.default: _Site(_rrelu, in_place=True),
    aten.log_normal_.default: _Site(_log_normal, lambda _: 2, in_place=True),
    aten.cauchy_.default: _Site(_cauchy, in_place=True),
    aten.geometric_.default: _Site(_geometric, in_place=True),
    **dict.fromkeys(_NORMALS, _Site(_normal_around, lambda _: 2)),
    **dict.fromkeys(_INTEGERS, _Site(_integer)),
    aten.randperm.default: _Site(permutation),
    aten.multinomial.default: _Site(picks),
    aten.bernoulli.default: _Site(_bernoulli),
    aten.bernoulli.p: _Site(_bernoulli_number),
    aten.bernoulli.Tensor: _Site(_bernoulli_tensor),
    aten.bernoulli_.float: _Site(_bernoulli_number, in_place=True),
    aten.bernoulli_.Tensor: _Site(_bernoulli_tensor, in_place=True),
}
