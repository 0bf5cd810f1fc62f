"""On processes rank 0 compiles, or reads, for all whose models do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
import autopar.doors.compile
from autopar import ParallelModule
from autopar.errors import AutoparError
from autopar.runtime.execute.world import local_of
from tests.support.models import residual
from tests.support.ranks import share


def blocks(eps: float = 1e-5) -> nn.Module:
    torch.manual_seed(0)
    model = residual.Residual().double()
    for block in model.blocks:
        block.norm.eps = eps
    return model


def compiled(model: nn.Module, axes: dict[str, int], **options: Any) -> tuple[ParallelModule, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    batch = share({"ids": residual.batch()[0]}, mesh)
    return autopar.compile(model, mesh, example_inputs=batch, **{"backend": "eager"} | options), batch


@contextmanager
def only_reading(here: bool) -> Generator[None]:
    """A rank that is `here` compiles nothing."""
    refused = mock.Mock(side_effect=AssertionError("nothing is to be compiled"))
    with mock.patch.object(autopar.doors.compile, "compile_call", refused if here else autopar.doors.compile.compile_call):
        yield


def digest(parallel: ParallelModule, batch: dict[str, Tensor], loss: Tensor) -> str:
    loss.backward()
    tensors = (loss, *(local_of(each.grad) for each in parallel.parameters() if each.grad is not None))
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def receives(folder: str, axes: dict[str, int], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Digests of a step of four compiles: without a cache, by rank 0, from its file, in a later grad mode; and who has a file."""
    rank = dist.get_rank()
    found: list[str] = []
    for cache, is_reading in ((None, False), (f"{folder}/{rank}", rank > 0), (f"{folder}/{rank}", True)):
        with only_reading(is_reading):
            parallel, batch = compiled(blocks(), axes, cache=cache, **options)
            found.append(digest(parallel, batch, parallel(**batch)))
    with only_reading(rank > 0), torch.no_grad():
        found.append(str(parallel(**batch).item()))
    return found, sorted(each.name for each in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("axes", "options"), [({"dp": 2, "tp": 2}, {}), ({"pp": 2, "dp": 2}, {"num_microbatches": 2, "cluster": "8xa100"})]
)
def test_rank_0_compiles_for_all(gloo_ranks: Any, tmp_path: Path, axes: dict[str, int], options: dict[str, Any]) -> None:
    for (plain, made, read, _), folders in gloo_ranks.run(receives, str(tmp_path), axes, options):
        assert plain == made == read
        assert folders == ["0"]


def is_born(folder: str) -> list[float]:
    """Losses of a model without values, which gets them on its ranks: without a cache, by rank 0, from its file."""
    losses: list[float] = []
    for cache, is_reading in ((None, False), (folder, dist.get_rank() > 0), (folder, True)):
        with torch.device("meta"):
            model = residual.Residual()
        with only_reading(is_reading):
            parallel, batch = compiled(model, {"dp": 2, "tp": 2}, cache=cache, weights="init")
            losses.append(parallel(**batch).item())
    return losses


def test_a_model_that_gets_its_values_on_ranks_is_received(gloo_ranks: Any, tmp_path: Path) -> None:
    for losses in gloo_ranks.run(is_born, str(tmp_path / "cache")):
        assert len(set(losses)) == 1


def inspects(folder: str) -> tuple[list[str], bool]:
    """What ranks 0 and 1 show, each alone, and whether all find the program right."""
    parallel, batch = compiled(blocks(), {"dp": 2, "tp": 2}, cache=folder)
    shown = [parallel.explain(), parallel.print_program(after="choose shardings")] if dist.get_rank() < 2 else []
    return shown, bool(parallel.verify(**batch))


def test_each_rank_shows_what_it_received(gloo_ranks: Any, tmp_path: Path) -> None:
    (first, _), (second, _), *_ = answers = gloo_ranks.run(inspects, str(tmp_path / "cache"))
    assert first == second and all(first) and all(is_equal for _, is_equal in answers)


def with_another_model(folder: str) -> list[str]:
    """What is heard where the model of rank 1 does something else, without a cache and with one."""
    told: list[str] = []
    for cache in (None, folder):
        with pytest.raises(AutoparError) as caught:
            compiled(blocks(1e-3 if dist.get_rank() == 1 else 1e-5), {"dp": 2, "tp": 2}, cache=cache)
        told.append(str(caught.value))
    return told


def test_another_model_on_one_rank_is_refused_as_ever(gloo_ranks: Any, tmp_path: Path) -> None:
    for without, cached in gloo_ranks.run(with_another_model, str(tmp_path / "cache")):
        assert without == cached and "compiled different programs" in cached
    assert not (tmp_path / "cache").exists()


def one_cannot_tell(folder: str) -> str:
    model = blocks()
    if dist.get_rank() == 2:
        model.register_forward_hook(lambda module, args, output: output)
    parallel, batch = compiled(model, {"dp": 2, "tp": 2}, cache=folder)
    return digest(parallel, batch, parallel(**batch))


def test_where_one_rank_cannot_tell_all_compile(gloo_ranks: Any, tmp_path: Path) -> None:
    gloo_ranks.run(one_cannot_tell, str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def within_too_little(folder: str) -> str:
    with pytest.raises(AutoparError) as caught:
        compiled(blocks(), {"dp": 2, "tp": 2}, cache=folder, memory_budget="1kB")
    return str(caught.value)


def test_what_rank_0_raises_all_raise(gloo_ranks: Any, tmp_path: Path) -> None:
    for text in gloo_ranks.run(within_too_little, str(tmp_path / "cache")):
        assert "memory_budget" in text


def of_unlike_options(options: dict[str, Any]) -> str:
    try:
        compiled(blocks(), {"dp": 2, "tp": 2}, **(options if dist.get_rank() == 1 else {}))
    except AutoparError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("option", ["cache", "pad_to"])
def test_ranks_of_unlike_options_are_refused(gloo_ranks: Any, option: str) -> None:
    options = {"cache": "elsewhere"} if option == "cache" else {"pad_to": autopar.PadTo(8, {"ids": 0})}
    for told in gloo_ranks.run(of_unlike_options, options):
        assert told.startswith("rank 0 has ") and "and rank 1 has " in told and f"{option}=" in told
