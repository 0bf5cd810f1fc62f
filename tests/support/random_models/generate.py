"""A seed → a random model."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.random_models import indexing, layers, layout, pointwise, products, reductions, writes
from tests.support.random_models.builder import SIZES, Builder
from tests.support.random_models.model import RandomModel

Family = Callable[[Builder], None]
MAX_CALLS = 6
FAMILIES: tuple[Family, ...] = tuple(
    family for module in (pointwise, products, layout, indexing, writes, reductions, layers) for family in module.FAMILIES
)
# Writes are drawn twice as often: they found most.
_DRAWN = (*FAMILIES, *writes.FAMILIES)
# Whatever a dropout leaves: none of these goes by the order of values, which is not known before the draws.
_BEHIND_A_DROPOUT: tuple[Family, ...] = (*pointwise.SMOOTH, *products.SMOOTH, *layout.SMOOTH)
# Of a family that was drawn, and of a model. What needs certain dims or sizes would be rare if it were tried once.
_TRIES, _MAX_TRIES = 4, 60
_TERMS = ("{v}.square().mean()", "{v}.sum() * 0.1", "({v}.sin() * {v}).mean()", "torch.tanh({v}).sum()")


def random_model(seed: int, max_calls: int = MAX_CALLS, by_sample: bool = False, drops: bool = False) -> RandomModel:
    """A model of one to `max_calls` calls behind a first one, which reads a parameter. It returns the loss alone, or a dict with it.

    by_sample   no sample shows in the results of another
    drops       it drops out; not for comparisons with torch, whose draws are others
    """
    draw = random.Random(f"model {seed}")
    at = Builder(seed, draw, draw.choice((4, 6, 8)) if by_sample else draw.choice(SIZES[1:]), by_sample)
    families = _grow(at, draw.randint(1, max_calls), drops)
    terms = [at.form(_TERMS, v=name) for name in dict.fromkeys([at.kept[-1], *draw.sample(at.kept, min(2, len(at.kept)))])]
    outputs = dict.fromkeys(draw.sample(at.kept, min(2, len(at.kept))))
    results = ", ".join(["'loss': loss", *(f"'o{number}': {name}" for number, name in enumerate(outputs))])
    returned = at.one_of(("loss", f"{{{results}}}", f"{{{results}}}"))
    return at.model([*at.lines, f"loss = {' + '.join(terms)}", f"return {returned}"], families)


def _grow(at: Builder, num_calls: int, drops: bool) -> list[str]:
    """Add so many calls, if as many can be drawn. The names of their families."""
    num_dims = at.number(1, 3)
    start = at.input((at.batch, *(at.number(2, 10 - 2 * num_dims) for _ in range(num_dims))))
    at.kept.append(start)
    width = at.shape(start)[-1]
    at.keep(f"F.linear({start}, {at.parameter(at.number(2, 6), width)})" if at.chance(0.6) else f"{start} * {at.parameter(width)}")
    found: list[str] = []
    choices = _DRAWN
    for _ in range(_MAX_TRIES):
        if len(found) == num_calls:
            break
        is_dropped = drops and choices is _DRAWN and at.chance(0.3)
        family = layers.dropout if is_dropped else at.one_of(choices)
        if any(_takes(at, family) for _ in range(_TRIES)):
            found.append(family.__name__)
            choices = _BEHIND_A_DROPOUT if is_dropped else choices
    return found


def _takes(at: Builder, family: Family) -> bool:
    """Whether a call of the family, with what it happens to draw, could be added."""
    before = len(at.lines)
    with at.trial():
        family(at)
    return len(at.lines) > before
