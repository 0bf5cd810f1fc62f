"""Block-sparse attention in a user's model: captured whole, exact on any mesh, its heads split; layouts held, and layouts computed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Cluster
from autopar.kernels.block_sparse import block_sparse_attention

LENGTH, WIDTH, NUM_HEADS, BLOCK_SIZE = 64, 32, 4, 16
NUM_BLOCKS = LENGTH // BLOCK_SIZE


class Sparse(nn.Module):
    """One layer of attention to a local window of blocks and to the first block, and a regression on it."""

    def __init__(self, num_groups: int, is_causal: bool) -> None:
        super().__init__()
        size = WIDTH // NUM_HEADS
        self.num_groups, self.is_causal = num_groups, is_causal
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, num_groups * size), nn.Linear(WIDTH, num_groups * size)

    def layout(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        query, key, value = (
            projected(x).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2) for projected in (self.query, self.key, self.value)
        )
        out, _ = block_sparse_attention(query, key, value, self.layout(), block_size=BLOCK_SIZE, is_causal=self.is_causal)
        return ((self.output(out.transpose(1, 2).flatten(2)) - y) ** 2).mean()


class Held(Sparse):
    """Each head has a layout of its own, in a buffer; one row of blocks attends to nothing."""

    def __init__(self, num_groups: int = NUM_HEADS, is_causal: bool = True) -> None:
        super().__init__(num_groups, is_causal)
        layout = torch.rand(NUM_HEADS, NUM_BLOCKS, NUM_BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5
        layout[1, 2] = False
        self.register_buffer("blocks", layout)

    def layout(self) -> Tensor:
        return self.get_buffer("blocks")


class Computed(Sparse):
    """All heads share a layout that the forward computes."""

    def __init__(self, num_groups: int = NUM_HEADS, is_causal: bool = True) -> None:
        super().__init__(num_groups, is_causal)

    def layout(self) -> Tensor:
        blocks = torch.arange(NUM_BLOCKS)
        return (((blocks[:, None] - blocks).abs() <= 1) | (blocks == 0)).unsqueeze(0)


CASES = {
    "a layout for each head, tp2": (lambda: Held(), {"tp": 2}),
    "a layout for each head, dp2×tp2": (lambda: Held(), {"dp": 2, "tp": 2}),
    "grouped heads, dp2×tp2": (lambda: Held(num_groups=2), {"dp": 2, "tp": 2}),
    "a computed layout, tp2": (lambda: Computed(), {"tp": 2}),
    "a computed layout, not causal, dp2×tp2": (lambda: Computed(is_causal=False), {"dp": 2, "tp": 2}),
}
# The first result of a call, printed: batch, then heads in two halves.
SPLIT = r"%{}(_\d+)? *: \(f32\[4(@dp)?, (4@tp|\(2@tp, 2\)), "


@pytest.mark.parametrize("name", CASES)
def test_exact_and_split_over_heads(name: str) -> None:
    make, mesh = CASES[name]
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, LENGTH, WIDTH), "y": torch.randn(4, LENGTH, WIDTH)}
    parallel = autopar.compile(
        make(),
        autopar.virtual_mesh(**mesh),
        example_inputs=batch,
        backend="eager",
        cluster=Cluster.ideal(),
        pins={"query": (None, None, "tp")},
    )
    for promote, tolerance in ((True, 1e-9), (False, 1e-4)):
        report = parallel.verify(promote=promote, **batch)
        assert report and report.worst <= tolerance, str(report)
    assert parallel.summary()["flops_split"] >= 0.98, parallel.explain()
    program = parallel.print_program(after="insert reshards")
    for op in ("block_sparse_attention", "block_sparse_attention_backward"):
        assert re.search(SPLIT.format(op), program), f"{op} is not split over heads"
