"""The whole state of a model, which all ranks gather together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError
from tests.support.models.stages import TwoLayers
from tests.support.ranks import GlooRanks


def gathered() -> tuple[bool, str]:
    """Whether the state is the model's before the first call; what is said on ranks of which one gathers it alone."""
    torch.manual_seed(0)
    model, x = TwoLayers(), torch.randn(2, 8, dtype=torch.float64)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = autopar.compile(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager", timeout=120)
    early = parallel.full_state_dict()
    parallel(x).backward()
    said = ""
    try:
        if dist.get_rank() == 0:
            parallel.full_state_dict()
        else:
            parallel(x)
    except InputError as error:
        said = str(error)
    return all(torch.equal(early[name], value) for name, value in wanted.items()), said


def test_a_rank_that_gathers_it_alone_is_told(gloo_ranks: GlooRanks) -> None:
    for is_equal, said in gloo_ranks.run(gathered):
        assert is_equal and "rank 0: full_state_dict() (which all ranks call, not rank 0 alone)" in said, said
