"""Sums, norms, extremes, scans and losses."""

from __future__ import annotations

from tests.support.random_models.builder import Builder, need

_REDUCTIONS = (
    "{x}.sum({dims}, keepdim={keep})", "{x}.mean({dims}, keepdim={keep})", "{x}.amax({dims}, keepdim={keep})",
    "{x}.amin({dims}, keepdim={keep})", "torch.logsumexp({x}, {dims}, keepdim={keep})", "{x}.std({dims}, correction=0, keepdim={keep})",
    "{x}.var({dims}, correction={flag}, keepdim={keep})", "{x}.tanh().prod({dim}, keepdim={keep})",
    "{x}.norm({p}, {dim}, keepdim={keep})",
    "{x}.norm(math.inf, {dim}, keepdim={keep})", "torch.linalg.vector_norm({x}, {p}, {dims}, keepdim={keep})", "{x}.max() * {x}",
    "{x}.min() + {x}", "torch.var_mean({x}, {dims}, keepdim=True)[0] + {x}", "torch.std_mean({x}, {dim})[1]", "{x}.nansum({dims})",
    "({x} > 0).sum({dim}).double()", "({x} > 0).any({dim}, keepdim=True) * {x}", "({x} > 0).all({dim}, keepdim={keep}).double()",
    "{x}.norm() * {x}", "{x}.aminmax(dim={dim})[1]", "torch.count_nonzero({x}, {dim}) + {x}.mean({dim})", "torch.trace({x})",
    "torch.linalg.norm({x}, dim={dim})", "torch.cov({x}.reshape({rows}, -1))",
)  # fmt: skip
# Reduced along a dim that stays.
_NORMALIZED = (
    "F.normalize({x}, p={p}, dim={dim})", "torch.renorm({x}, 2, 0, 1.0)", "F.cosine_similarity({x}, {x}.flip({dim}) + 1, dim={dim})",
    "{x}.softmax({dim})", "{x}.log_softmax({dim})", "F.softmin({x}, {dim})", "{x} - {x}.mean({dim}, keepdim=True)",
    "{x}.cumsum({dim}).mean({dims})", "{x} * ({x} == {x}.amax({dim}, keepdim=True))",
)  # fmt: skip
_SCANS = (
    "{x}.cumsum({dim})", "{x}.tanh().cumprod({dim})", "torch.logcumsumexp({x}, {dim})", "{x}.cummax({dim}).values", "{x}.cummin({dim})[0]",
    "{x}.sort({dim}, descending={keep}).values", "{x}.topk({k}, {dim}).values", "{x}.topk({k}, {dim}, largest=False)[0]",
    "{x}.kthvalue({k}, {dim}).values", "{x}.median({dim}).values", "{x}.gather({dim}, {x}.argsort({dim}))",
    "{x}.max({dim}, keepdim=True)[0] * {x}", "{x}.quantile(0.3, {dim})", "{x}.sort({dim})[1].double() * {x}",
    "{x}.argsort(dim={dim}, stable=True).double() + {x}", "{x}.argmax({dim}).double()", "{x}.msort()", "{x}.mode({dim})[0]",
    "torch.trapezoid({x}, dim={dim})", "torch.cumulative_trapezoid({x}, dim={dim})",
    "torch.searchsorted({x}.detach().flatten().sort()[0], {x}).double() * {x}",
    "torch.bucketize({x}, torch.tensor([-0.5, 0.1, 0.9], dtype=torch.float64)).double() + {x}", "{x}.nanmedian() + {x}",
    "torch.gradient({x}, dim={dim})[0]",
)  # fmt: skip
_CROSS_ENTROPIES = (
    "F.cross_entropy({x}, {labels}, reduction='{how}')", "F.cross_entropy({x}, {labels}, reduction='{how}', ignore_index=0)",
    "F.cross_entropy({x}, {labels}, reduction='{how}', label_smoothing=0.1)",
    "F.cross_entropy({x}, {labels}, reduction='{how}', weight={weight}.detach().abs())",
    "F.cross_entropy({x}, {labels}, reduction='{how}', weight={of_buffer}.abs(), ignore_index=1)",
    "F.cross_entropy({x}, {labels}, reduction='{how}', label_smoothing=0.2, ignore_index=1)",
    "F.nll_loss({x}.log_softmax(1), {labels}, reduction='{how}', ignore_index=1)",
    "F.cross_entropy({x}, {x}.detach().softmax(1), reduction='{how}')", "F.multi_margin_loss({x}, {labels}, reduction='{how}')",
)  # fmt: skip
_LOSSES = (
    "F.binary_cross_entropy_with_logits({x}, {mask}.double().expand({shape}), reduction='{how}')",
    "F.kl_div({x}.log_softmax(-1), {x}.detach().flip(0).softmax(-1), reduction='batchmean')",
    "F.mse_loss({x}, {x}.detach().flip(0) + 0.1, reduction='{how}')", "F.l1_loss({x}, {x}.detach().flip(0) + 0.1, reduction='{how}')",
    "F.smooth_l1_loss({x}, {x}.detach() + 0.1, reduction='{how}')", "F.huber_loss({x}, {x}.detach() + 0.1, reduction='{how}')",
    "F.triplet_margin_loss({x}, {x} * 2 + 1, {x}.flip(0), reduction='{how}')",
    "F.gaussian_nll_loss({x}, {x}.detach() * 0.5, {x}.square() + 0.1, reduction='{how}')",
    "F.poisson_nll_loss({x}.tanh(), {x}.detach().abs(), reduction='{how}')",
    "F.soft_margin_loss({x}, torch.sign({x}.detach().flip(0)), reduction='{how}')",
    "F.cosine_embedding_loss({x}.flatten(1), {x}.flip(0).flatten(1) + 1, torch.ones({rows}), margin=0.1, reduction='{how}')",
    "({x}.square() * {mask}).sum() / {x}.numel()",
)  # fmt: skip


def reduction(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape = at.shape(x)
    dims = at.draw.sample(range(len(shape)), at.number(1, min(3, len(shape))))
    fields = {"keep": at.chance(), "flag": int(at.chance()), "p": at.one_of((1, 2, 3)), "rows": shape[0]}
    at.keep(at.form((*_REDUCTIONS, *_NORMALIZED), x=x, dims=dims, dim=dims[0], **fields))


def scan(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    dim = at.dim(x)
    at.keep(at.form(_SCANS, x=x, dim=dim, keep=at.chance(), k=at.number(1, at.shape(x)[dim])))


def masked_mean(at: Builder) -> None:
    """Of the tokens that an input of the batch says are there."""
    x = at.tensor(lambda shape: len(shape) >= 2 and shape[0] == at.batch)
    shape, v, mask = at.shape(x), at.new_name(), at.new_name()
    ones = [*shape[:2], *[1] * (len(shape) - 2)]
    lines = [
        f"{mask} = {at.input(shape[:2], 1)}.double().reshape({ones})",
        f"{v} = ({x} * {mask}).sum(1) / {mask}.sum(1).clamp(min=1)",
    ]
    at.add(lines, [v])


def cross_entropy(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) >= 2 and shape[1] > 1)
    shape = at.shape(x)
    form = at.one_of(_CROSS_ENTROPIES)
    need("margin" not in form or len(shape) == 2)
    classes = shape[1]
    at.keep(
        at.fill(
            form,
            x=x,
            labels=lambda: at.ids((shape[0], *shape[2:]), classes),
            weight=lambda: at.parameter(classes),
            of_buffer=lambda: at.buffer((classes,)),
            how=at.one_of(("mean", "sum")),
        )
    )


def loss(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape = at.shape(x)
    at.keep(at.form(_LOSSES, x=x, mask=lambda: at.mask(shape), shape=list(shape), rows=shape[0], how=at.one_of(("mean", "sum"))))


FAMILIES = (reduction, scan, masked_mean, cross_entropy, loss)
