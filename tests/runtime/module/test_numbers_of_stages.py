"""Numbers of several parameters on processes that have those of one stage of a pipeline: refused; and what is right there is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from tests.support.models.stages import TwoLayers

RHO = 0.5


def built(axes: tuple[str, ...] = ("pp", "dp")) -> tuple[nn.Module, autopar.ParallelModule, Tensor, Tensor]:
    """A model, the same on stages after a backward, the batch and this rank's share of it."""
    torch.manual_seed(0)
    model, x, mesh = TwoLayers(), torch.randn(8, 8, dtype=torch.float64), init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    share = x.chunk(2)[mesh.get_local_rank("dp")]
    parallel = autopar.compile(copy.deepcopy(model), mesh, cluster="ideal", backend="eager", example_inputs=(share,))
    parallel(share).backward()
    return model, parallel, x, share


def gradients(parallel: nn.Module) -> list[Tensor]:
    return [each.grad for each in parallel.parameters() if each.grad is not None]


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


JOINED: dict[str, Callable[[list[Tensor]], Any]] = {
    "norms": lambda of: torch.stack([each.norm() for each in of]).norm(),
    "one of a stage": lambda of: torch.stack([of[0].norm()]).norm(),
    "scaled": lambda of: torch.norm(torch.stack([(1.0 * each).norm(p=2).to(torch.float32) for each in of]), p=2),
    "torch's clipping": lambda of: nn.utils.get_total_norm(of),
    "squares": lambda of: sum(each.norm() ** 2 for each in of),
    "sums": lambda of: sum(each.pow(2).sum() for each in of),
    "one vector": lambda of: torch.cat([each.flatten() for each in of]).norm(),
    "of vectors": lambda of: torch.dot(nn.utils.parameters_to_vector(of), nn.utils.parameters_to_vector(of)),
    "of one place": lambda of: torch.cat([each.norm().view(1) for each in of]),
    "maximum": lambda of: torch.maximum(of[0].abs().max(), of[1].abs().max()),
}
ALONE: dict[str, Callable[[list[Tensor]], Any]] = {
    "norms": lambda of: [float(whole(each.norm())) for each in of],
    "ratios": lambda of: [each.norm() / (each.pow(2).sum().sqrt() + 1e-4 * each.norm()) for each in of],
    "whole numbers": lambda of: torch.stack([whole(each.norm()) for each in of]).norm(),
    "parts of one": lambda of: torch.cat([of[0] * 2, of[0]]).norm(),
    "vectors": lambda of: torch.cat([each.flatten() for each in of]) * 2,
    "of two": lambda of: torch.max(of[0], of[1].sum()),
    "a mean over steps": lambda of: [each.norm().mul_(0.9).add_(each.norm(), alpha=0.1) for each in of],
}


def refusals() -> tuple[dict[str, str], dict[str, str]]:
    _, parallel, _, _ = built()
    said: tuple[dict[str, str], dict[str, str]] = {}, {}
    for found, ways in zip(said, (JOINED, ALONE), strict=True):
        for name, compute in ways.items():
            try:
                compute(gradients(parallel))
                found[name] = ""
            except AutoparError as error:
                found[name] = str(error)
    return said


def test_a_number_of_several_gradients_of_a_stage_is_refused_and_one_of_each_is_not(gloo_ranks: Any) -> None:
    for joined, alone in gloo_ranks.run(refusals):
        assert all("parallel.clip_grad_norm_(float('inf'))" in text for text in joined.values()), joined
        assert not any(alone.values()), alone


def perturbed() -> float:
    """How far a sharpness-aware loss is off, by the way that the refusal names."""
    model, parallel, x, share = built()
    model(x).backward()
    losses = []
    for module, batch in ((model, x), (parallel, share)):
        norm = module.clip_grad_norm_(float("inf")) if module is parallel else nn.utils.get_total_norm(gradients(module))
        with torch.no_grad():
            for each in module.parameters():
                assert each.grad is not None
                each.add_(each.grad * (RHO / (norm + 1e-12)))
            losses.append(float(module(batch)))
    return abs(losses[1] - losses[0])


def test_a_perturbation_by_the_norm_of_all_gradients_is_that_of_one_process(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(perturbed)) < 1e-12


def penalised() -> float:
    model, parallel, x, share = built()
    parallel.zero_grad()
    for module, batch in ((model, x), (parallel, share)):
        loss: Tensor = module(batch) + 0.1 * sum((each.pow(2).sum() for each in module.parameters()), torch.zeros(()))
        loss.backward()
    wanted = {name: each.grad for name, each in model.named_parameters()}
    return max(float((whole(each.grad) - wanted[name]).abs().max()) for name, each in parallel.named_parameters() if each.grad is not None)


def test_a_penalty_on_each_parameter_is_no_number_of_several(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(penalised)) < 1e-12


def without_stages() -> float:
    model, parallel, x, _ = built(("dp", "tp"))
    model(x).backward()
    found = nn.utils.get_total_norm(gradients(parallel))
    return float((whole(found) - nn.utils.get_total_norm(gradients(model))).abs())


def test_without_stages_torchs_norm_of_all_is_right(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(without_stages)) < 1e-12
