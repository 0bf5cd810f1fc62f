"""What layers of networks compute: convolutions, pools, norms, attention, recurrence, and regions of torch's own."""

from __future__ import annotations

import math

from tests.support.random_models.builder import Builder, need

_POOLS = (
    "F.max_pool{n}d({x}, {k}, {step}, {pad}, ceil_mode={flag})", "F.avg_pool{n}d({x}, {k}, {step}, {pad}, ceil_mode={flag})",
    "F.avg_pool{n}d({x}, {k}, {step}, {pad}, count_include_pad=False)", "F.adaptive_avg_pool{n}d({x}, {k})",
    "F.adaptive_max_pool{n}d({x}, 2)", "F.lp_pool{n}d({x}.abs() + 0.1, 2, {k})",
    "F.max_pool{n}d({x}, {k}, {step}, {pad}, dilation=1, return_indices=True)[0]",
)  # fmt: skip
_OF_IMAGES = (
    "F.interpolate({x}, scale_factor=2, mode='nearest')", "F.interpolate({x}, scale_factor=2, mode='bicubic')",
    "F.interpolate({x}, scale_factor=2, mode='area')", "F.interpolate({x}, size=({k}, {m}), mode='bilinear', align_corners={flag})",
    "F.interpolate({x}, size=({k}, {m}), mode='nearest-exact')", "F.unfold({x}, {small}, padding={pad}, stride={step})",
    "F.pixel_unshuffle({x}, 2)", "F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)", "F.channel_shuffle({x}, {groups})",
    "F.fold(F.unfold({x}, 2, padding=1), {image}, 2, padding=1)",
    "F.grid_sample({x}, torch.tanh({x}[:, :1].permute(0, 2, 3, 1).expand(-1, -1, -1, 2)), align_corners=False)",
)  # fmt: skip
_OF_SEQUENCES = (
    "F.interpolate({x}, scale_factor=2, mode='nearest')", "F.interpolate({x}, scale_factor=2, mode='linear')",
    "F.interpolate({x}, size={k}, mode='linear', align_corners={flag})", "F.interpolate({x}, size={k})",
)  # fmt: skip
_NORMS = (
    "F.layer_norm({x}, {last}, {weight}, {weight2}, 0.1)", "F.layer_norm({x}, {last}, {weight}, eps=0.1)",
    "F.layer_norm({x}, {last}, eps=0.1)",
    "F.rms_norm({x}, {last}, {weight}, 0.1)", "F.group_norm({x}, {groups}, {c}, {c2}, 0.1)", "F.local_response_norm({x}, 3)",
    "F.batch_norm({x}, {mean}, {var}, {c}, {c2}, training=True, momentum=0.3, eps=0.1)",
    "F.batch_norm({x}, {mean}, {var}, training=self.training, eps=0.1)", "F.batch_norm({x}, None, None, {c}, training=True, eps=0.1)",
    "F.instance_norm({x}, None, None, {c}, {c2}, eps=0.1)",
)  # fmt: skip
_ATTENTIONS = (
    "{sdpa})", "{sdpa}, is_causal=True)", "{sdpa}, attn_mask={mask} | torch.eye({n}, dtype=torch.bool))", "{sdpa}, attn_mask={bias})",
    "{sdpa}, scale=0.4)", "{sdpa}, attn_mask={keys} | torch.eye({n}, dtype=torch.bool))",
)  # fmt: skip
# Reads under `no_grad` of what trains. The last give it back as it is, and it trains on.
_WITHOUT_GRADIENTS = (
    "{x} * 2",
    "F.mse_loss({x}, {x}.flip(0))",
    "{x}.mean()",
    "torch.atleast_2d({x}).sum()",
    "{x}.softmax(-1)",
    "{x}.square().sum()",
    "{x}.double()",
    "{x}.type_as({x}.sin())",
    "F.dropout({x}, 0.0)",
    "torch.atleast_1d({x})",
)


def convolution(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) in (3, 4))
    shape = at.shape(x)
    groups, dims = _groups(at, shape[1]), len(shape) - 2
    outer = groups * at.number(1, 3)
    kernel = [at.number(1, min(3, size + 1)) for size in shape[2:]]
    bias = at.parameter(outer) if at.chance() else "None"
    dilation, step = at.number(1, 2), at.number(1, 2)
    if at.chance(0.3):
        weight = at.parameter(shape[1], outer // groups, *kernel)
        how = f"stride={step}, padding={at.number(0, 1)}, groups={groups}, dilation={dilation}"
        at.keep(f"F.conv_transpose{dims}d({x}, {weight}, {bias}, {how})")
        return
    weight = at.parameter(outer, shape[1] // groups, *kernel)
    padding = at.one_of(("0", "1", "2", *["'same'"] * (step == 1)))
    at.keep(f"F.conv{dims}d({x}, {weight}, {bias}, stride={step}, padding={padding}, dilation={dilation}, groups={groups})")


def _groups(at: Builder, channels: int) -> int:
    return at.one_of([number for number in range(1, channels + 1) if channels % number == 0])


def pool(at: Builder) -> None:
    x, k = at.tensor(lambda shape: 2 <= len(shape) <= 4), at.number(1, 3)
    n = max(len(at.shape(x)) - 2, 1)
    at.keep(at.form(_POOLS, x=x, n=n, k=k, step=at.number(1, 2), pad=at.number(0, k // 2), flag=at.chance()))


def resample(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) in (3, 4))
    shape = at.shape(x)
    fields = {"k": at.number(1, 5), "m": at.number(1, 5), "small": at.number(1, 2), "pad": at.number(0, 1), "step": at.number(1, 2)}
    fields |= {"groups": _groups(at, shape[1]), "flag": at.chance()}
    at.keep(at.form(_OF_IMAGES if len(shape) == 4 else _OF_SEQUENCES, x=x, image=list(shape[2:]), **fields))


def norm(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) >= 2)
    shape = at.shape(x)
    last, channels = list(shape[-at.number(1, len(shape) - 1) :]), shape[1]
    form = at.one_of(_NORMS)
    need("instance" not in form and "response" not in form or len(shape) > 2)
    at.keep(
        at.fill(
            form,
            x=x,
            last=last,
            weight=lambda: at.parameter(*last),
            weight2=lambda: at.parameter(*last),
            groups=_groups(at, channels),
            c=lambda: at.parameter(channels),
            c2=lambda: at.parameter(channels),
            mean=lambda: at.buffer((channels,)),
            var=lambda: at.buffer((channels,)),
        )
    )


def attention(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) in (3, 4))
    shape = at.shape(x)
    length = shape[-2]
    form = at.one_of(_ATTENTIONS)
    need("{keys}" not in form or shape[0] == at.batch)
    key = f"({x} @ {at.parameter(shape[-1], shape[-1])})"
    at.keep(
        at.fill(
            form,
            sdpa=f"F.scaled_dot_product_attention({x}, {key}, {at.one_of((x, key))}",
            n=length,
            mask=lambda: at.mask((length, length)),
            bias=lambda: at.parameter(length, length),
            keys=lambda: at.input((at.batch, *[1] * (len(shape) - 2), length), 1),
        )
    )


def grouped_attention(at: Builder) -> None:
    """Fewer heads of keys than of queries."""
    x = at.tensor(lambda shape: len(shape) == 4)
    heads, width = at.shape(x)[1], at.shape(x)[-1]
    shared = f"{x}[:, :{_groups(at, heads)}]"
    how = at.one_of(("", ", is_causal=True"))
    at.keep(
        f"F.scaled_dot_product_attention({x}, {shared} * {at.parameter(width)}, {shared} @ {at.parameter(width, 2)}{how}, enable_gqa=True)"
    )


def attention_by_hand(at: Builder) -> None:
    """Heads out of one projection, scores, perhaps a mask and a bias, a softmax."""
    x = at.tensor(lambda shape: len(shape) == 3)
    batch, length, width = at.shape(x)
    heads = _groups(at, width)
    query, key, value, scores, v = (at.new_name() for _ in range(5))
    projected = f"F.linear({x}, {at.parameter(3 * width, width)}).reshape({batch}, {length}, 3, {heads}, {width // heads})"
    lines = [
        f"{query}, {key}, {value} = {projected}.permute(2, 0, 3, 1, 4)",
        f"{scores} = {query} @ {key}.transpose(-1, -2) / {math.sqrt(width // heads)}",
    ]
    if at.chance():
        lines.append(f"{scores} = {scores}.masked_fill(torch.ones({length}, {length}, dtype=torch.bool).triu(1), float('-inf'))")
    if at.chance(0.3):
        lines.append(f"{scores} = {scores} + {at.parameter(heads, length, length)}")
    lines.append(f"{v} = ({scores}.softmax(-1) @ {value}).transpose(1, 2).reshape({batch}, {length}, {width})")
    at.add(lines, [v])


def multi_head_attention(at: Builder) -> None:
    """torch's own, [length, batch, width], with weights or without."""
    x = at.tensor(lambda shape: len(shape) == 3)
    length, batch, width = at.shape(x)
    keys = f"{at.input((batch, length), 1)} & (torch.arange({length}) > 0)" if batch == at.batch and at.chance() else "None"
    mask = at.one_of(("None", f"torch.ones({length}, {length}, dtype=torch.bool).triu(1)"))
    needs, v, weights = at.chance(), at.new_name(), at.new_name()
    into = f"{at.parameter(3 * width, width)}, {at.parameter(3 * width)}, None, None, {at.chance()}, 0.0"
    out = f"{at.parameter(width, width)}, {at.parameter(width)}, training=True, key_padding_mask={keys}, attn_mask={mask}"
    call = f"F.multi_head_attention_forward({x}, {x}, {x}, {width}, {_groups(at, width)}, {into}, {out}, need_weights={needs})"
    at.add([f"{v}, {weights} = {call}"], [v, weights] if needs else [v])


def recurrence(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) == 3)
    batch, length, width = at.shape(x)
    size, state, states, v = at.one_of((2, 3)), at.new_name(), at.new_name(), at.new_name()
    step = f"torch.tanh(F.linear({x}[:, t], {at.parameter(size, width)}) + {state} @ {at.parameter(size, size)})"
    lines = [
        f"{state}, {states} = torch.zeros({batch}, {size}, dtype=torch.float64), []",
        f"for t in range({length}): {state} = {step}; {states}.append({state})",
        f"{v} = torch.stack({states}, 1)",
    ]
    at.add(lines, [v])


def checkpointed(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    parameter = at.parameter(at.shape(x)[-1])
    at.keep(f"torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t * {parameter}) * t, {x}, use_reentrant=False)")


def dropout(at: Builder) -> None:
    """Of a value, or of an attention's weights."""
    x = at.tensor()
    rate = at.one_of((0.1, 0.5))
    attention = f"F.scaled_dot_product_attention({x}, {x}, {x}, dropout_p={rate} if self.training else 0.0)"
    at.keep(attention if len(at.shape(x)) == 4 else f"F.dropout({x}, {rate}, self.training)")


def without_gradients(at: Builder) -> None:
    x, v, read = at.tensor(lambda shape: len(shape) > 0), at.new_name(), at.new_name()
    at.add([f"with torch.no_grad(): {read} = {at.form(_WITHOUT_GRADIENTS, x=x)}", f"{v} = {x} * {read}"], [v])


FAMILIES = (
    convolution, pool, resample, norm, attention, grouped_attention, attention_by_hand,
    multi_head_attention, recurrence, checkpointed, without_gradients,
)  # fmt: skip
