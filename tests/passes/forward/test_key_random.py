"""Keyed draws: their distribution, their independence, their dependence on nothing but key and position, and what is refused."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

import autopar
from autopar._torch import fake_mode
from autopar.errors import CaptureError
from autopar.frontend.capture import capture
from autopar.graph import draws
from autopar.graph.draws import Draws
from autopar.graph.emit import Emitter
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.kernels.attention import attention
from autopar.kernels.dropout import drawn
from autopar.passes.forward.key_random import KeyRandom
from autopar.passes.forward.unify_attention import UnifyAttention
from autopar.runtime.execute.random_key import random_key
from tests.support.models.layer import Calls

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
SHAPE = (64, 256, 64)
NUM = 64 * 256 * 64


def keyed(function: Callable[[Tensor], object], x: Tensor) -> Program:
    program = capture(Calls(function).train(), (x,), {}, virtual_mesh(dp=1), outputs="all")
    return KeyRandom().apply(UnifyAttention().apply(program))


def run(program: Program, x: Tensor, seed: int = 0, step: int = 0) -> tuple[Tensor, ...]:
    return program.module()(x, torch.tensor(random_key(seed, step)))


def dropped(x: Tensor) -> tuple[Tensor, ...]:
    return F.dropout(x, 0.25), F.dropout(x, 0.25), F.dropout(x, 0.5)


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((one.flatten().double(), other.flatten().double())))[0, 1])


def bound(num: int) -> float:
    """Five standard deviations of a correlation of `num` independent pairs."""
    return 5 / num**0.5


@pytest.fixture(scope="module")
def dropout_program() -> Program:
    return keyed(dropped, torch.ones(SHAPE))


def test_the_share_that_is_kept_and_its_scale(dropout_program: Program) -> None:
    for result, probability in zip(run(dropout_program, torch.ones(SHAPE)), (0.25, 0.25, 0.5), strict=True):
        torch.testing.assert_close(result.unique(), torch.tensor([0.0, 1 / (1 - probability)]))
        share = float((result != 0).float().mean())
        assert abs(share - (1 - probability)) < 5 * (probability * (1 - probability) / NUM) ** 0.5


def test_steps_seeds_and_sites_are_independent(dropout_program: Program) -> None:
    x = torch.ones(SHAPE)
    runs = {f"seed {seed}, step {step}": run(dropout_program, x, seed, step)[:2] for seed, step in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]}
    draws = {f"{name}, site {site}": result for name, results in runs.items() for site, result in enumerate(results)}
    for (first, one), (second, other) in itertools.combinations(draws.items(), 2):
        assert abs(correlation(one, other)) < bound(NUM), f"{first} against {second}"


def test_the_same_key_gives_the_same_draws(dropout_program: Program) -> None:
    x = torch.randn(SHAPE)
    for one, other in zip(run(dropout_program, x, 3, 4), run(dropout_program, x, 3, 4), strict=True):
        assert torch.equal(one, other)


def test_neighbours_are_independent_under_every_key() -> None:
    """A hash of two rounds fails this, though not under every key."""
    distances = [1, 2, 3, 7, 100, *(2**power for power in range(2, 18, 2)), *(2**power + 1 for power in range(3, 18, 3))]
    deviations = []
    for key, threshold in itertools.product(range(6), (0.1, 0.5)):
        line = (bits_of((2**19,), key=random_key(0, key)) < threshold * 2**32).float() - threshold
        line /= (threshold * (1 - threshold)) ** 0.5
        deviations += [float(line[step:] @ line[:-step]) / (2**19 - step) ** 0.5 for step in distances]
    assert max(map(abs, deviations)) < 5
    assert 0.85 < statistics.stdev(deviations) < 1.15


def test_rows_and_columns_are_independent(dropout_program: Program) -> None:
    square = (run(dropout_program, torch.ones(SHAPE))[0] != 0)[0, :64, :64]
    assert abs(correlation(square, square.T)) < bound(64 * 32)


def test_sums_along_every_dim_spread_as_independent_draws_do(dropout_program: Program) -> None:
    kept = (run(dropout_program, torch.ones(SHAPE))[2] != 0).double()
    for dims in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        sums = kept.sum(dims)
        expected = 0.25 * NUM / sums.numel()
        assert abs(float(sums.var()) / expected - 1) < 5 * (2 / sums.numel()) ** 0.5, f"sums over {dims}"


def test_words_that_lie_close_do_not_repeat_the_draws() -> None:
    """Two sites whose first words differ by `distance` walk over the same numbers, that far apart."""
    for distance in (0, 1, 64):
        one = bits_of((NUM,), words=(12345, 0x5A17C3D9))
        other = bits_of((NUM,), words=(12345 + distance, 0x91E0B64F))
        line, shifted = one[distance:] < 2**31, other[: NUM - distance] < 2**31
        assert abs(correlation(line, shifted)) < bound(NUM - distance)


def bits_graph(shape: tuple[int, ...]) -> tuple[Graph, Node, Node]:
    """(graph, key, draws of `shape` from the only site)."""
    graph = Graph()
    key = graph.placeholder("key")
    with fake_mode():
        key.meta["val"] = torch.empty((), dtype=torch.int64)
    end = graph.output(())
    draws = Draws(graph, key, 1)
    bits = draws.bits(Emitter(graph, before=end), shape)
    end.args = ((bits,),)
    return graph, key, bits


def bits_of(shape: tuple[int, ...], key: int = 5, parts: dict[int, range] | None = None, words: tuple[int, int] | None = None) -> Tensor:
    """The draws of `shape`, or of the `parts` of some dims alone; `words` replaces the words of the site."""
    graph, _, _ = bits_graph(shape)
    selects = 0
    for node in list(graph.nodes):
        if words is not None and node.target is aten.select.int:
            selects += 1
            node.target, node.args, node.kwargs = aten.scalar_tensor.default, (words[selects - 1],), {"dtype": torch.int64}
        if parts and node.target is aten.arange.default and node.args[0] in shape:
            _slice(graph, node, shape, parts)
    return torch.fx.GraphModule(nn.Module(), graph)(torch.tensor(key))[0]


def _slice(graph: Graph, index: Node, shape: tuple[int, ...], parts: dict[int, range]) -> None:
    """What sharding does: the `arange` of a split dim starts elsewhere and is shorter; so is the view of it."""
    dim = shape.index(index.args[0])  # type: ignore[arg-type]
    part = parts.get(dim, range(shape[dim]))
    index.target, index.args = aten.arange.start, (part.start, part.stop)
    view = next(user for node in (index, *index.users) for user in node.users if user.target is aten.view.default)
    view.args = (view.args[0], [-1 if other == dim else 1 for other in range(len(shape))])


def test_a_part_of_the_positions_gets_the_same_draws() -> None:
    shape = (6, 10, 8)
    whole = bits_of(shape)
    assert torch.equal(bits_of(shape, parts={0: range(2, 4), 2: range(4, 8)}), whole[2:4, :, 4:8])
    assert torch.equal(bits_of(shape, parts={1: range(5, 10)}), whole[:, 5:10])


def test_more_positions_than_32_bits_count() -> None:
    """Parts of 2³⁴ positions, 2³² apart, and their neighbours."""
    shape = (2**20, 2**14)
    places = [0, 1, 2**18, 2**18 + 1, 2**19]
    draws = [bits_of(shape, parts={0: range(place, place + 1)}).flatten() for place in places]
    assert all(draw.unique().numel() > 2**14 - 5 for draw in draws)
    for one, other in itertools.combinations(draws, 2):
        assert abs(correlation(one, other)) < bound(2**14)
        assert torch.isin(one, other).sum() < 5


def test_draws_fill_their_range_evenly() -> None:
    draws = bits_of((2**20,))
    assert 0 <= int(draws.min()) and int(draws.max()) < 2**32
    for shift in (28, 24):
        num_bins = 2 ** (32 - shift)
        counts = torch.bincount(draws >> shift, minlength=num_bins).double()
        statistic = float(((counts - 2**20 / num_bins) ** 2 / (2**20 / num_bins)).sum())
        assert abs(statistic - (num_bins - 1)) < 5 * (2 * (num_bins - 1)) ** 0.5


def test_no_product_overflows() -> None:
    """Signed overflow is undefined in compiled C++: recompute the draws in Python's integers, watching the largest."""
    graph, _, _ = bits_graph((5, 7))
    exact: dict[Node, list[int]] = {}
    environment = {"key": torch.tensor(random_key(1, 1))}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            result = super().run_node(n)
            if n.target is aten.mul.Tensor:
                value = self.env[n.args[0]]  # type: ignore[index]
                exact[n] = [int(item) * int(n.args[1]) for item in value.flatten()]  # type: ignore[arg-type]
                assert exact[n] == result.flatten().tolist()  # type: ignore[attr-defined]
            return result

    Watch(torch.fx.GraphModule(nn.Module(), graph)).run(environment["key"])
    assert len(exact) >= 5


def test_compilers_give_the_same_draws() -> None:
    program = keyed(dropped, torch.ones(8, 6))
    x = torch.randn(8, 6)
    compiled = torch.compile(program.module(), backend="aot_eager")(x, torch.tensor(random_key(0, 0)))
    for one, other in zip(compiled, run(program, x), strict=True):
        assert torch.equal(one, other)


def test_dropout_passes_the_gradient_where_it_passed_the_value(dropout_program: Program) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    result = run(dropout_program, x)[0]
    (grad,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(grad * x, result)


def test_the_key_is_the_last_input(dropout_program: Program) -> None:
    item = dropout_program.signature.inputs[-1]
    assert (item.kind, item.shape, item.dtype) == ("random_key", (), torch.int64)
    assert dropout_program.placeholders[-1].meta["val"].dtype == torch.int64
    assert [len(dropout_program.signature.inputs)] == [len(dropout_program.placeholders)]


def test_nothing_is_added_where_nothing_is_drawn() -> None:
    program = keyed(lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False), torch.ones(4, 4))
    assert not program.signature.inputs_of("random_key")
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [aten.add.Tensor]


def test_everything_is_dropped_at_probability_one() -> None:
    program = keyed(lambda x: F.dropout(x, 1.0), torch.ones(4, 4))
    assert not run(program, torch.ones(4, 4))[0].any()


def test_dropout_in_place_and_of_channels() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        F.dropout(y, 0.5, inplace=True)
        return y, F.dropout2d(x, 0.5)

    x = torch.ones(32, 16, 3, 3)
    inside, channels = run(keyed(function, x), x)
    assert set(inside.unique().tolist()) == {0.0, 4.0}
    per_channel = channels.flatten(2)
    assert torch.equal(per_channel, per_channel[:, :, :1].expand_as(per_channel))
    assert 0.3 < float((per_channel[:, :, 0] != 0).float().mean()) < 0.7


def test_native_dropout() -> None:
    x = torch.ones(64, 64)
    result, mask = run(keyed(lambda x: torch.native_dropout(x, 0.25, True), x), x)
    assert torch.equal(result != 0, mask)


def test_attention_dropout_is_keyed() -> None:
    x = torch.randn(2, 3, 4, 8)
    program = keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), x)
    call = next(node for node in program.graph.nodes if node.target is attention)
    assert [each.meta["val"].shape for each in call.args[6:9]] == [(2, 3, 4, 1), (), (4,)]
    assert not any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in program.graph.nodes)
    first, second, other = run(program, x)[0], run(program, x)[0], run(program, x, step=1)[0]
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_attention_draws_as_its_probabilities_would() -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64)

    def plain(x: Tensor) -> Tensor:
        return F.dropout((x @ x.mT * 0.3).softmax(-1), 0.5) @ x

    fused = keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, scale=0.3), x)
    torch.testing.assert_close(run(fused, x)[0], run(keyed(plain, x), x)[0], rtol=1e-12, atol=1e-12)
    everything = keyed(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0), x)
    assert torch.equal(run(everything, x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("most", [2**32, 24])
@pytest.mark.parametrize("shape", [(5,), (3, 1), (1, 1, 7), (2, 3, 4, 5)], ids=str)
def test_positions_are_what_the_bits_are_made_of(shape: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a word tells fewer positions apart than there are, so that leading dims have words of their own."""
    monkeypatch.setattr(draws, "_MOST_POSITIONS", most)
    graph, mode = Graph(), fake_mode()
    key = graph.placeholder("key")
    with mode:
        key.meta["val"] = torch.empty((), dtype=torch.int64)
    graph.output((key,))
    emit, one, other = Emitter(graph, next(reversed(graph.nodes))), *(Draws(graph, key, 1) for _ in range(2))
    rows, second, columns = one.positions(emit, shape)
    assert columns.meta["val"].shape == shape[-1:]
    assert torch.broadcast_shapes(rows.meta["val"].shape, (*shape[:-1], 1)) == (*shape[:-1], 1)
    bits = other.bits(emit, shape)
    assert bits.meta["val"].shape == shape
    next(reversed(graph.nodes)).args = ((rows, second, columns, bits),)
    *positions, wanted = torch.fx.GraphModule({}, graph)(torch.tensor(random_key(3, 1)))
    assert torch.equal(drawn(*positions).broadcast_to(shape), wanted)
    assert (positions[1].dim() > 0) == (math.prod(shape) > most)


def test_distributions() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand(NUM),
            torch.rand_like(x, dtype=torch.float64),
            torch.randn(NUM),
            torch.randn_like(x),
            torch.bernoulli(x * 0 + 0.3),
            torch.empty_like(x).uniform_(2.0, 4.0),
            torch.empty_like(x).normal_(1.0, 3.0),
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).bernoulli_(0.2),
            torch.randint(0, 10, (NUM,)).double(),
            torch.randint(-4, 4, (NUM,)).double(),
        )

    x = torch.zeros(NUM)
    results = run(keyed(function, x), x)
    twelfth = 12**-0.5
    moments = [(0.5, twelfth), (0.5, twelfth), (0, 1), (0, 1), (0.3, 0.21**0.5), (3, 2 * twelfth), (1, 3), (0.5, 0.5), (0.2, 0.4)]
    moments += [(4.5, 8.25**0.5), (-0.5, 5.25**0.5)]
    for position, (result, (mean, deviation)) in enumerate(zip(results, moments, strict=True)):
        result = result.double()
        assert abs(float(result.mean()) - mean) < 5 * deviation / NUM**0.5, f"mean of draw {position}"
        assert abs(float(result.std()) / deviation - 1) < 0.01, f"deviation of draw {position}"
    assert float(results[0].max()) < 1 and set(results[9].unique().tolist()) == set(range(10))
    assert abs(correlation(results[2], results[3])) < bound(NUM)
    tails = [float((results[2].abs() > limit).double().mean()) for limit in (1, 2, 3)]
    torch.testing.assert_close(tails, [0.3173, 0.0455, 0.0027], rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    x = torch.empty(2**18, dtype=dtype)
    (result,) = run(keyed(torch.rand_like, x), x)
    assert result.dtype == dtype and 0 <= float(result.min()) and float(result.max()) < 1


def test_what_cannot_be_keyed_is_refused_with_its_place() -> None:
    with pytest.raises(CaptureError, match=r"(?s)aten.poisson.default at .*test_key_random.py.*aten.binomial.default.*how to mend it"):
        keyed(lambda x: (torch.poisson(x), torch.binomial(x, x)), torch.ones(4, 4))


def test_keys_of_neighbouring_seeds_and_steps_are_unrelated() -> None:
    keys = [random_key(seed, step) for seed in range(40) for step in range(40)]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**62 for key in keys)
    assert random_key(-1, 0) == random_key(2**64 - 1, 0)
    flipped = [bin(one ^ other).count("1") for one, other in itertools.pairwise(keys)]
    assert 30 < sum(flipped) / len(flipped) < 32 and min(flipped) > 10


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout, F.dropout2d])
def test_dropouts_in_evaluation_draw_nothing(function: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 3, 2, 2)
    found = keyed(lambda x: function(x, 0.5, training=False) * 2, x)
    assert all(item.kind != "random_key" for item in found.signature.inputs)
    torch.testing.assert_close(found.module()(x)[0], 2 * x)


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropouts_are_torchs_with_other_draws(function: Callable[..., Tensor], probability: float) -> None:
    """Both make two affine functions of each number, by whether it is kept; torch's are read off it at 0 and 1."""
    x = torch.randn(8, 16, 8)
    (found,) = run(keyed(lambda x: function(x, probability, training=True), x), x)
    at_zero, at_one = (function(torch.full((64, 64, 1), value), probability, training=True) for value in (0.0, 1.0))
    if probability == 1.0:
        assert not found.any() and not at_one.any()
        return
    dropped_to, shift = at_zero.min(), at_zero.max()
    scale = at_one.max() - shift
    is_kept = (found - dropped_to).abs() > 1e-5
    torch.testing.assert_close(found, torch.where(is_kept, scale * x + shift, dropped_to))
    share = float(is_kept.double().mean())
    num = x.numel() if function is F.alpha_dropout else 8 * 16
    assert abs(share - (1 - probability)) < 5 * (probability * (1 - probability) / num) ** 0.5
    if function is F.feature_alpha_dropout:
        assert (is_kept == is_kept[..., :1]).all()


def test_slopes_of_rrelu_are_uniform_draws_in_training() -> None:
    x = torch.randn(64, 256)
    (found,) = run(keyed(lambda x: F.rrelu(x, 0.1, 0.4, training=True), x), x)
    slopes = (found / x)[x < 0]
    assert (found[x > 0] == x[x > 0]).all()
    assert 0.1 <= slopes.min() < 0.11 and 0.39 < slopes.max() <= 0.4 + 1e-6 and abs(slopes.mean() - 0.25) < 0.005
    torch.testing.assert_close(keyed(lambda x: F.rrelu(x, 0.1, 0.4), x).module()(x)[0], F.rrelu(x, 0.1, 0.4))


def test_rrelu_in_place_draws_nothing_in_evaluation() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=True), nn.Linear(8, 4)).eval(), torch.randn(8, 8)
    parallel = autopar.compile(model, autopar.virtual_mesh(dp=2), example_inputs=(x,), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(parallel(x), model(x))
    assert parallel.verify(x)
