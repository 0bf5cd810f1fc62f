"""Models that look at values run as they are, split; what they assert is asserted when the program runs, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import virtual_mesh
from autopar.errors import ValueCheckError
from tests.support.models import asserting
from tests.support.models.asserting import Careful


def batch(**changes: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 4, generator=draw), "scale": torch.rand(8, 4, generator=draw) + 0.5} | changes


def parallel_careful(mesh: Any, **options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.compile(Careful(), mesh, backend="eager", **options)


@pytest.mark.parametrize(
    ("mesh", "num_microbatches"), [({"dp": 2, "tp": 2}, None), ({"pp": 2}, 4), ({"pp": 2, "dp": 2}, 2)], ids=["split", "pipe", "both"]
)
def test_what_does_not_hold_in_a_call_is_an_error_with_its_line(mesh: dict[str, int], num_microbatches: int | None) -> None:
    parallel = parallel_careful(virtual_mesh(**mesh), example_inputs=batch(), num_microbatches=num_microbatches)
    assert parallel.verify(**batch(), promote=True)
    assert parallel.summary()["flops_split"] == 1
    assert "asserted of values in every call\n  x is not finite where: " in parallel.explain(detail="all")
    parallel(**batch()).backward()
    wrong = batch()
    wrong["scale"][1, :3] = -1  # one sample, in one microbatch of one share
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(ValueCheckError) as caught:
            parallel(**wrong)
        text = str(caught.value)
        assert text.startswith("torch.distributions: a parameter or a value is outside of what the distribution takes"), text
        assert f"where: {asserting.__file__}:" in text and "Normal(self.down(hidden), scale)" in text and "violated by 3 values" in text
    infinite = batch()
    infinite["x"][7, 0] = torch.inf
    with pytest.raises(AssertionError, match=r"x is not finite\n  where: .*assert x\.isfinite\(\)\.all\(\)"):
        parallel(**infinite)
    parallel(**batch())


def checked_by_ranks() -> str:
    parallel = parallel_careful(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), num_microbatches=2)
    rank = torch.distributed.get_rank()
    mine = {name: value.chunk(2)[rank % 2].clone() for name, value in batch().items()}
    parallel(**mine)
    mine["scale"][0, 0] *= 1 - 2 * (rank % 2)  # of one share alone
    with pytest.raises(ValueCheckError) as caught:
        parallel(**mine)
    parallel(**{name: value.abs() for name, value in mine.items()})
    return str(caught.value)


def test_every_rank_raises_what_one_share_violates(gloo_ranks: Any) -> None:
    for text in gloo_ranks.run(checked_by_ranks):
        assert "outside of what the distribution takes" in text and "violated by" not in text, text


def test_a_transformer_takes_its_causal_mask_without_a_look_at_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask).square().mean()

    x = torch.randn(4, 6, 8)
    parallel = autopar.compile(Model(), virtual_mesh(dp=2, tp=2), example_inputs=(x,), backend="eager")
    assert parallel.verify(x, promote=True)
    assert parallel.summary()["flops_split"] == 1


def test_a_batch_norm_without_momentum_counts_its_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)).double()
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, virtual_mesh(dp=2, tp=2), backend="eager")
    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.float64) + 1
        torch.testing.assert_close(parallel(x), reference(x))
    for ours, theirs in zip(parallel.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
