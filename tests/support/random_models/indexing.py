"""Reads and writes by indices that are tensors."""

from __future__ import annotations

import math

from tests.support.random_models.builder import SIZES, Builder, need

_GATHERS = (
    "{x}.gather({dim}, {like})", "{x}.take_along_dim({like}, {dim})", "{x}[{before}{row}]", "{x}.take({flat})",
    "{x}.gather({dim}, {smaller})",
)  # fmt: skip
_PAIRS = (
    "{x}[{rows}, {columns}]", "{x}[torch.arange({batch}), {columns}]", "{x}[{few}[:, None], {columns}[None, :2]]", "{x}[{rows}, :2]"
)  # fmt: skip
_SCATTERS = (
    "{base}.scatter_add({dim}, {into}, {x})", "{base}.scatter_reduce({dim}, {into}, {x}, '{reduction}', include_self={flag})",
    "{base}.index_add({dim}, {line}, {x})", "F.one_hot({labels}, {n}).double() * {p}",
    "torch.slice_scatter({x}, {x}.narrow({dim}, 0, 1) * 2, {dim}, {size} - 1, {size})",
    "torch.select_scatter({x}, {x}.select({dim}, 0) * 2, {dim}, {size} - 1)", "{x}.scatter_add({dim}, {within}, {x})",
)  # fmt: skip
_EMBEDDINGS = (
    "F.embedding_bag({bags}, {table}, mode='{mode}')", "{table}[{ids}]", "F.embedding({ids}, {table}, scale_grad_by_freq=True)",
    "F.embedding({ids}, {table}, padding_idx={padding})", "F.embedding({ids}, {table})",
)  # fmt: skip


def gather(at: Builder) -> None:
    x = at.tensor(lambda shape: 1 <= len(shape) <= 4)
    shape, dim, n = at.shape(x), at.dim(x), at.one_of((1, 2, 3, 5))
    size = shape[dim]
    like = tuple(n if i == dim else other for i, other in enumerate(shape))
    at.keep(
        at.form(
            _GATHERS,
            x=x,
            dim=dim,
            before=":, " * dim,
            like=lambda: at.ids(like, size),
            smaller=lambda: at.ids(tuple(n if i == dim else at.number(1, other) for i, other in enumerate(shape)), size),
            row=lambda: at.ids((n,), size),
            flat=lambda: at.ids((at.batch, n), math.prod(shape)),
        )
    )


def gather_pairs(at: Builder) -> None:
    """By an index of dim 0 and one of dim 1."""
    x = at.tensor(lambda shape: 2 <= len(shape) <= 4)
    rows, columns = at.shape(x)[:2]
    form = at.one_of(_PAIRS)
    need("arange" not in form or rows == at.batch)

    def ids(limit: int) -> str:
        return at.ids((at.batch,), limit)

    at.keep(at.fill(form, x=x, batch=at.batch, rows=lambda: ids(rows), columns=lambda: ids(columns), few=lambda: ids(rows)))


def scatter(at: Builder) -> None:
    x = at.tensor(lambda shape: 1 <= len(shape) <= 3)
    shape, dim, n = at.shape(x), at.dim(x), at.one_of((2, 3, 5))
    base = f"torch.{at.one_of(('zeros', 'ones'))}({[n if i == dim else size for i, size in enumerate(shape)]}, dtype=torch.float64)"
    fields = {"reduction": at.one_of(("sum", "mean", "amax", "amin", "prod")), "flag": at.chance(), "size": shape[dim], "n": n}
    at.keep(
        at.form(
            _SCATTERS,
            x=x,
            dim=dim,
            base=base,
            into=lambda: at.ids(shape, n),
            within=lambda: at.ids(shape, shape[dim]),
            line=lambda: at.ids((shape[dim],), n),
            labels=lambda: at.ids((at.batch, at.one_of((1, 2, 3))), n),
            p=lambda: at.parameter(n),
            **fields,
        )
    )


def embedding(at: Builder) -> None:
    num_rows, width = at.one_of((3, 5, 6, 7)), at.one_of(SIZES)
    shape = (at.batch, *(at.one_of((2, 3, 5)) for _ in range(at.number(0, 2))))
    at.keep(
        at.form(
            _EMBEDDINGS,
            ids=lambda: at.ids(shape, num_rows),
            bags=lambda: at.ids((at.batch, 3), num_rows),
            table=lambda: at.parameter(num_rows, width),
            mode=at.one_of(("sum", "mean", "max")),
            padding=at.one_of((0, 1, -1)),
        )
    )


FAMILIES = (gather, gather_pairs, scatter, embedding)
