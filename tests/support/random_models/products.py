"""Contractions, and what torch.linalg and torch.fft compute."""

from __future__ import annotations

from tests.support.random_models.builder import SIZES, Builder, need

_MATMUL = ("F.linear({x}, {w}, {b})", "{x} @ {u}", "torch.matmul({x}, {u}) + {b}", "F.linear({x}, {w})")
_OF_MATRICES = ("torch.addmm({b}, {x}, {u}, beta=0.5)", "torch.mm({u}.t(), {x}.t())")
_OF_BATCHES = ("torch.bmm({x}, {x}.transpose(1, 2))", "torch.baddbmm({b}, {x}, {u}.expand({batch}, -1, -1), alpha=0.5)")
# Of a square matrix whose eigenvalues are at least one.
_LINALG = (
    "torch.linalg.inv({m})", "torch.linalg.cholesky({m})", "torch.linalg.solve({m}, {x}.transpose(-1, -2))", "torch.logdet({m})",
    "torch.linalg.det({m}).log()", "torch.linalg.matrix_norm({x})", "torch.linalg.svdvals({m})", "torch.linalg.eigvalsh({m})",
    "torch.linalg.matrix_power({m} * 0.1, 2)", "torch.linalg.slogdet({m})[1]",
    "torch.linalg.solve_triangular({m}.tril(), {x}.transpose(-1, -2), upper=False)", "torch.matrix_exp({m} * 0.05)",
)  # fmt: skip
_SPECTRAL = (
    "torch.fft.rfft({x}, dim={dim}).abs()", "torch.fft.fft({x}, dim={dim}).real",
    "torch.fft.irfft(torch.fft.rfft({x}, dim={dim}) * 1j, n={n}, dim={dim})", "torch.view_as_real(torch.complex({x}, {x}.cos()))",
    "torch.polar({x}.abs() + 0.1, {x}).imag", "torch.fft.fft2({x}).real",
    "torch.fft.ifft(torch.fft.fft({x}, dim={dim}) * 1j, dim={dim}).imag",
    "torch.fft.fftshift({x}, dim={dim})", "(torch.complex({x}, {x} * 2) * torch.complex({x}.cos(), {x})).conj().imag",
    "torch.fft.rfftn({x}).real", "torch.complex({x}, {x}.sin()).abs()", "torch.fft.fft({x}, n={n} + 1, dim={dim}, norm='ortho').imag",
    "torch.view_as_real(torch.view_as_complex({x}.unsqueeze(-1).repeat_interleave(2, -1)) * 1j)",
    "torch.complex({x}, {x}).sum({dim}).angle()", "torch.fft.hfft({x}, dim={dim})",
    "torch.stft({x}.reshape(-1)[:8], 4, return_complex=True, window=torch.ones(4, dtype=torch.float64)).abs()",
)  # fmt: skip


def matmul(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    shape, size = at.shape(x), at.one_of(SIZES)
    forms = (*_MATMUL, *_OF_MATRICES * (len(shape) == 2), *_OF_BATCHES * (len(shape) == 3))
    at.keep(
        at.form(
            forms,
            x=x,
            w=lambda: at.parameter(size, shape[-1]),
            u=lambda: at.parameter(shape[-1], size),
            b=lambda: at.parameter(size),
            batch=shape[0],
        )
    )


def product(at: Builder) -> None:
    """Of two values, in batches where both have more dims."""
    x = at.tensor(lambda shape: len(shape) >= 2)
    *outer, _, size = at.shape(x)
    others = [(name, at.shape(name)) for name in at.kept if len(at.shape(name)) >= 2]
    fitting = [name for name, shape in others if shape[-2] == size and list(shape[:-2]) in (outer, [])]
    turned = [f"{name}.transpose(-1, -2)" for name, shape in others if shape[-1] == size and list(shape[:-2]) == outer]
    at.keep(f"torch.matmul({x}, {at.one_of([*fitting, *turned])}) * 0.5")


def einsum(at: Builder) -> None:
    """A tensor with a parameter that has some of its dims and perhaps one more; what is left, in any order."""
    x = at.tensor(lambda shape: 1 <= len(shape) <= 4)
    letters = "abcd"[: len(at.shape(x))]
    sizes = dict(zip(letters, at.shape(x), strict=True))
    term = at.draw.sample(letters, at.number(1, min(3, len(letters))))
    if at.chance():
        sizes["z"] = at.one_of(SIZES)
        term.append("z")
    at.draw.shuffle(term)
    result = _some(at, [*sizes])
    parameter = at.parameter(*(sizes[letter] for letter in term))
    at.keep(f"torch.einsum('{letters},{''.join(term)}->{result}', {x}, {parameter})")


def special_einsum(at: Builder) -> None:
    """A diagonal, three operands, one twice, or an ellipsis."""
    x = at.tensor(lambda shape: 1 <= len(shape) <= 4)
    shape = at.shape(x)
    letters = "abcd"[: len(shape)]
    kind = at.number(0, 3)
    if kind == 0:
        first, second = at.one_of([(i, j) for i in range(len(shape)) for j in range(i) if shape[i] == shape[j]])
        named = letters.replace(letters[first], letters[second])
        at.keep(f"torch.einsum('{named}->{''.join(at.draw.sample(sorted(set(named)), len(set(named))))}', {x})")
    elif kind == 1:
        letter = at.one_of(letters)
        size = shape[letters.index(letter)]
        at.keep(
            f"torch.einsum('{letters},{letter}z,{letter}->{_some(at, [*letters, 'z'])}', "
            f"{x}, {at.parameter(size, at.one_of(SIZES))}, {at.parameter(size)})"
        )
    elif kind == 2:
        at.keep(f"torch.einsum('{letters},{letters[:-1]}y->{_some(at, list(letters))}y', {x}, {x}) * 0.3")
    else:
        at.keep(f"torch.einsum('...{letters[-1]},{letters[-1]}z->z...', {x}, {at.parameter(shape[-1], at.one_of(SIZES))})")


def _some(at: Builder, letters: list[str]) -> str:
    kept = [letter for letter in letters if at.chance(0.65)]
    at.draw.shuffle(kept)
    return "".join(kept)


def tensordot(at: Builder) -> None:
    x = at.tensor(lambda shape: 2 <= len(shape) <= 4)
    shape = at.shape(x)
    first, second = at.draw.sample(range(len(shape)), 2)
    weight = at.parameter(shape[second], at.one_of(SIZES), shape[first])
    at.keep(f"torch.tensordot({x}, {weight}, dims=([{first}, {second}], [2, 0]))")


def linalg(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) >= 2)
    size = at.shape(x)[-1]
    at.keep(at.form(_LINALG, x=x, m=f"({x}.transpose(-1, -2) @ {x} + torch.eye({size}, dtype=torch.float64))"))


def spectral(at: Builder) -> None:
    x = at.tensor(lambda shape: len(shape) > 0)
    need(max(at.shape(x)) > 1)  # the imaginary part of a single number's transform is zero, by rounding or exactly
    dim = at.dim(x, lambda size: size > 1)
    at.keep(at.form(_SPECTRAL, x=x, dim=dim, n=at.shape(x)[dim]))


SMOOTH = (matmul, einsum, tensordot)
FAMILIES = (matmul, product, einsum, special_einsum, tensordot, linalg, spectral)
