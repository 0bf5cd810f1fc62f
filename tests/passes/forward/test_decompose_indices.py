"""Ranges among indices as gathers and scatters: values and gradients as torch's own, samples apart from one another."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification

import autopar
from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.ir.program import Program
from autopar.passes.forward.decompose_indices import DecomposeIndices

Indexed = Callable[[Tensor, Tensor, Tensor], Tensor]
SAMPLES, POSITIONS, WIDTH = 8, 6, 5
RANGE: Any = range(SAMPLES)  # which torch takes, and its types do not say


def rows(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def put(indices: Callable[[Tensor, Tensor, Tensor], Any], values: Indexed, accumulate: bool = False) -> Indexed:
    def write(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        x = x * 1
        if accumulate:
            return x.index_put(indices(x, one, two), values(x, one, two), accumulate=True)
        x[indices(x, one, two)] = values(x, one, two)
        return x

    return write


# x [samples, positions, width] · one position of each sample, from −6 on · two of each.
READS: dict[str, Indexed] = {
    "one of each": lambda x, one, two: x[rows(x), one],
    "ids of 32 bits": lambda x, one, two: x[rows(x), one.int()],
    "ids of 32 bits for a range": lambda x, one, two: x[rows(x).int(), one],
    "several of each": lambda x, one, two: x[rows(x)[:, None], two],
    "a range that is spread": lambda x, one, two: x[rows(x)[:, None].expand(-1, 2), two],
    "a range spread as the ids": lambda x, one, two: x[rows(x)[:, None].expand_as(two), two],
    "a range that is repeated": lambda x, one, two: x[rows(x)[:, None].repeat(1, 2), two],
    "a range of Python's": lambda x, one, two: x[RANGE, one],
    "a table of each": lambda x, one, two: x[rows(x).view(-1, 1, 1), torch.stack((two, two - 1, two), 1).clamp(min=-POSITIONS)],
    "the same of all": lambda x, one, two: x[rows(x)[:, None], torch.arange(3, device=x.device)],
    "the last of each": lambda x, one, two: x[rows(x), -1],
    "all, in order": lambda x, one, two: x[rows(x)],
    "all of another dim": lambda x, one, two: x[:, torch.arange(POSITIONS)],
    "a part of what is found": lambda x, one, two: x[rows(x), one, 1:3],
    "the first": lambda x, one, two: x.transpose(0, 1)[one, rows(x)],
    "the last dim": lambda x, one, two: x[rows(x), :, one % WIDTH],
    "behind a dim": lambda x, one, two: x.transpose(0, 2)[:, two % POSITIONS, rows(x)[:, None]],
    "two ranges": lambda x, one, two: x[rows(x)[:, None], torch.arange(POSITIONS)[None], two.repeat(1, 3) % WIDTH],
    "ranges in another order": lambda x, one, two: x[rows(x)[None], torch.arange(POSITIONS)[:, None], (two.repeat(1, 3) % WIDTH).mT],
}
WRITES: dict[str, Indexed] = {
    "one of each": put(lambda x, one, two: (rows(x), one), lambda x, one, two: x[:, 0].exp()),
    "a number": put(lambda x, one, two: (rows(x), one), lambda x, one, two: torch.tensor(2.0, dtype=x.dtype)),
    "several of each": put(lambda x, one, two: (rows(x)[:, None], two), lambda x, one, two: x[:, :2].exp()),
    "the same for all": put(lambda x, one, two: (rows(x)[:, None], two), lambda x, one, two: torch.ones(WIDTH, dtype=x.dtype)),
    "the last dim": put(lambda x, one, two: (rows(x), slice(None), one % WIDTH), lambda x, one, two: x[:, :, 0].exp()),
    "added": put(lambda x, one, two: (rows(x), one), lambda x, one, two: x[:, 0].exp(), accumulate=True),
    "added, twice": put(lambda x, one, two: (rows(x)[:, None], one[:, None].expand(-1, 2)), lambda x, one, two: x[:, :2].exp(), True),
    "one hot": lambda x, one, two: x * x.new_zeros(x.shape[:2]).index_put((rows(x), one), x.new_ones(()))[..., None],
}
OTHERWISE: dict[str, Indexed] = {
    "a permuted range": lambda x, one, two: x[rows(x).flip(0), one],
    "a shorter range": lambda x, one, two: x[rows(x)[:4], one[:4]],
    "a range from one on": lambda x, one, two: x[:, 1:][rows(x) % 2, one],
    "two kinds of ids": lambda x, one, two: x[one, one],
    "ids of samples": lambda x, one, two: x[one],
    "a range that is written": lambda x, one, two: x[rows(x).mul_(-1), one],
}


class Model(nn.Module):
    def __init__(self, indexed: Indexed) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.indexed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), indexed

    def forward(self, x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return self.indexed(self.outer(self.inner(x).tanh()), one, two).square().sum()


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    two = torch.stack([torch.randperm(2 * POSITIONS, generator=draw)[:2] - POSITIONS for _ in range(SAMPLES)])
    two[:, 1] = (two[:, 0] + 1).clamp(max=POSITIONS - 1) - POSITIONS * (two[:, 0] == POSITIONS - 1)  # of a sample not the same twice
    one = torch.randint(-POSITIONS, POSITIONS, (SAMPLES,), generator=draw)
    return {"x": torch.randn(SAMPLES, POSITIONS, WIDTH, generator=draw, dtype=torch.float64), "one": one, "two": two}


def num_indices(program: Program) -> int:
    return sum(str(node.target).startswith("aten.index") for node in program.graph.nodes)


@pytest.mark.parametrize(("kind", "name"), [*product(["read"], READS), *product(["write"], WRITES)])
def test_exact_and_in_microbatches(kind: str, name: str) -> None:
    model = Model((READS if kind == "read" else WRITES)[name]).double()
    captured = capture(model, (), batch(), virtual_mesh(dp=1))
    decomposed = DecomposeIndices().apply(captured)
    assert num_indices(captured) and not num_indices(decomposed)
    found, before = (each.graph.find_nodes(op="output")[0].args[0][0].meta["val"] for each in (decomposed, captured))
    assert found.shape == before.shape and found.dtype == before.dtype
    indexed = [node.meta["val"].stride() for node in captured.graph.nodes if str(node.target).startswith("aten.index")]
    assert {*indexed} <= {node.meta["val"].stride() for node in decomposed.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    parallel = autopar.compile(
        model, autopar.virtual_mesh(pp=2, dp=2), example_inputs=batch(), num_microbatches=2, outputs="loss", backend="eager"
    )
    assert parallel.verify(**batch()) and "no rank repeats another's work" in parallel.explain()


@pytest.mark.parametrize("name", OTHERWISE)
def test_others_stay_as_they_are(name: str) -> None:
    captured = capture(Model(OTHERWISE[name]).double(), (), batch(), virtual_mesh(dp=1))
    assert num_indices(DecomposeIndices().apply(captured)) == num_indices(captured) > 0
    if name != "a range that is written":
        parallel = autopar.compile(Model(OTHERWISE[name]).double(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
        assert parallel.verify(**batch())


def test_an_index_is_a_copy() -> None:
    """What is written into it is not written into what it is of, where it takes all of that, too."""

    def write(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        found = x[rows(x)]
        found[:, 0] = 0.0
        return found + x[rows(x), one].mul_(2)[:, None] + x

    parallel = autopar.compile(Model(write).double(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    assert parallel.verify(**batch())


def changed(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    x = x * 1
    x[rows(x), one] -= 0.35  # as margins of losses do
    x[rows(x)[:, None], two] = x[rows(x)[:, None], two].tanh()
    x[rows(x), :, one % WIDTH] *= 0.5
    return x


def gathered(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found[rows(x), one] = x[:, 0]
    found[rows(x), one] += x[:, 1]
    return found.sin() * x


@pytest.mark.parametrize("write", [changed, gathered])
def test_what_is_read_may_be_written(write: Indexed) -> None:
    """A gather keeps what it reads for its backward, where an index keeps nothing."""
    for axes in ({"dp": 2}, {"pp": 2, "dp": 2}):
        parallel = autopar.compile(Model(write).double(), autopar.virtual_mesh(**axes), example_inputs=batch(), backend="eager")
        assert parallel.verify(**batch()) and "no rank repeats another's work" in parallel.explain()


def test_what_is_overwritten_is_seen_by_other_names() -> None:
    def write(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        x = x * 1
        part = x[:, :, 1:]
        part[rows(x), one] = 3.0
        return x

    parallel = autopar.compile(Model(write).double(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    assert parallel.verify(**batch())


@pytest.mark.parametrize(
    "viewed",
    [
        lambda x, one, two: x.transpose(0, 2)[:, torch.arange(POSITIONS)].permute(2, 1, 0).view(SAMPLES, -1),
        lambda x, one, two: x[torch.arange(SAMPLES).view(1, -1, 1), torch.stack([two.mT] * 3, -1)].view_as(
            torch.ones(2 * SAMPLES, 3 * WIDTH)
        ),
    ],
    ids=["a permuted whole", "as another"],
)
def test_what_is_indexed_is_viewed_as_torch_lays_it_out(viewed: Indexed) -> None:
    parallel = autopar.compile(Model(viewed).double(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    assert parallel.verify(**batch())


def test_a_position_that_is_not_there_raises() -> None:
    parallel = autopar.compile(Model(READS["one of each"]).double(), autopar.virtual_mesh(dp=2), example_inputs=batch(), backend="eager")
    for wrong in (POSITIONS, -POSITIONS - 1):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            parallel(**batch() | {"one": torch.full((SAMPLES,), wrong)})


def test_a_classifier_of_whole_texts_trains_in_microbatches_on_the_default_backend() -> None:
    """transformers reads the logits of each text's last token, `logits[arange(batch), last]`."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, num_labels=3, pad_token_id=0, use_cache=False,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (8, 16))
    for text, length in enumerate((16, 3, 9, 1, 16, 12, 7, 5)):
        tokens[text, length:] = 0
    given = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.randint(0, 3, (8,))}
    parallel = autopar.compile(GPT2ForSequenceClassification(config), autopar.virtual_mesh(pp=2, dp=2), example_inputs=given)
    assert parallel.compiled.local.mesh.num_microbatches == 4 and parallel.verify(**given)
