"""Real ranks: what runs on gloo equals what runs on virtual ranks."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.driver.compiled import Compiled
from autopar.errors import AutoparError, InputError, MeshError, ScheduleError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement
from autopar.ir.sharding import Sharding, shape_of
from autopar.runtime.execute.distributed_world import DistributedWorld
from autopar.runtime.execute.process_groups import ProcessGroups
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.parameters import local_shard
from autopar.runtime.module.placement import check_equal_models, refined_device_mesh, torch_can_gather, torch_can_gather_tensor, wrap
from tests.support.schedules import BATCH, WIDTH, Mlp, mlp_compiled, schedule_of


def cpu_mesh(**axes: int) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


# ---- parameters as DTensors


def random_placement(generator: random.Random, mesh: Mesh) -> Placement:
    counts = [generator.randint(0, 3) for _ in range(generator.randint(1, 3))]
    splits: list[list[str]] = [[] for _ in range(sum(counts))]
    for axis in generator.sample(mesh.names, len(mesh.names)):
        if splits and generator.random() < 0.8:
            generator.choice(splits).append(axis)
    atoms = iter([mesh.size_of(split) * generator.randint(1, 3) for split in splits])
    dims = tuple(tuple(next(atoms) for _ in range(count)) for count in counts)
    return Placement(dims, Sharding(tuple(map(tuple, splits))), mesh)


def full_tensors_are_whole() -> tuple[list[str], int]:
    """The placements that come back wrong, and how many torch gathered."""
    wrong, generator, gathered = list[str](), random.Random(0), 0
    logging.getLogger("torch").setLevel(logging.ERROR)  # it advises to flatten meshes
    for axes, refined in (({"dp": 2, "tp": 2}, None), ({"tp": 4}, [2, 2])):
        world = DistributedWorld(cpu_mesh(**axes))
        mesh = world._refined = world.mesh.refine("tp", refined) if refined else world.mesh
        fine = refined_device_mesh(world.device_mesh, mesh)
        for _ in range(60):
            placement = random_placement(generator, mesh)
            shape = shape_of(placement.dims)
            whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
            tensor = wrap(local_shard(whole, placement.dims, placement.sharding, mesh, world.rank), placement, fine)
            world.placements["x"] = placement
            text = f"{placement.sharding.describe(placement.dims)} as {tensor.placements}"
            if not torch.equal(world.full(tensor, "x"), whole):
                wrong.append(f"gathered by us: {text}")
            assert torch_can_gather_tensor(tensor) and torch_can_gather(placement), text
            gathered += 1
            wrong += [f"{name}: {text}" for name in _wrong_of(tensor, whole, gathered % 4 == 0)]
    return wrong, gathered


def _wrong_of(tensor: DTensor, whole: torch.Tensor, with_views: bool) -> list[str]:
    """Which of what a user does to a parameter does not give what it gives of the whole."""
    leaf, plain = tensor.detach().requires_grad_(), whole.clone().requires_grad_()
    (leaf.full_tensor() * whole).sum().backward()
    (plain * whole).sum().backward()
    assert isinstance(leaf.grad, DTensor) and plain.grad is not None
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a softmax": lambda x: x.softmax(0),
        "a sum": lambda x: x.sum(0),
        "a product": lambda x: torch.dot(x.flatten(), x.flatten()),
    }
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "in one dim": lambda x: x.view(-1),
        "a vector": lambda x: nn.utils.parameters_to_vector([x, 2 * x]),
        "two dims": lambda x: x.reshape(-1, *x.shape[-1:]),
        "moved, in one dim": lambda x: x.transpose(0, -1).flatten(),
        "and back": lambda x: x.flatten().view(x.shape).cumsum(0),
    }
    along = [Replicate() if axis == 0 else Shard(whole.ndim - 1) for axis in range(tensor.device_mesh.ndim)]
    other = distribute_tensor(whole * 2, tensor.device_mesh, along)
    laid_out = other.redistribute(placements=tensor.placements)
    pairs = {
        "the whole": (tensor.full_tensor(), whole),
        "its gradient": (leaf.grad.full_tensor(), plain.grad),
        "from other parts": (laid_out.to_local(), (tensor * 2).to_local()),
    }
    for name, way in (ways | (views if with_views else {})).items():
        leaves = tensor.detach().requires_grad_(), whole.clone().requires_grad_()
        found, wanted = (way(each) for each in leaves)
        assert isinstance(found, DTensor)
        pairs[name] = found.full_tensor(), wanted
        if with_views:
            weights = torch.arange(1.0, wanted.numel() + 1).view(wanted.shape)
            for each in pairs[name]:
                (each * weights).sum().backward()
            gradient: Any = leaves[0].grad
            assert leaves[1].grad is not None
            pairs[f"the gradient of {name}"] = gradient.full_tensor(), leaves[1].grad
    written = tensor.detach().clone()
    written.view(-1).mul_(2)
    pairs["what is written into a view"] = written.full_tensor(), whole * 2
    return [name for name, (each, wanted) in pairs.items() if not torch.allclose(each, wanted)]


def test_whole_values_come_back_from_dtensors(gloo_ranks: Any) -> None:
    for wrong, gathered in gloo_ranks.run(full_tensors_are_whole):
        assert not wrong and gathered == 120


# ---- the module


def real_mlp(**options: Any) -> tuple[ParallelModule, Mlp]:
    device_mesh = cpu_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    model = Mlp()
    reference, mesh = copy.deepcopy(model), Mesh.of(device_mesh)

    def capture(args: Any, kwargs: dict[str, torch.Tensor], *, pins: Any, shares: Any) -> Compiled:
        assert kwargs["x"].shape == (BATCH, WIDTH), "capture sees the global batch"
        assert all(not isinstance(parameter, DTensor) and parameter.shape in ((8, 6), (6, 8)) for parameter in model.parameters())
        return mlp_compiled(mesh, torch.is_grad_enabled())

    options = {"backend": "eager", "timeout": 30, **options}
    return ParallelModule(model, mesh, capture=capture, device_mesh=device_mesh, **options), reference


def global_batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(BATCH, WIDTH, generator=generator), "y": torch.randn(BATCH, WIDTH, generator=generator)}


def share(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    index = dist.get_rank() // 2
    return {name: value.chunk(2)[index] for name, value in batch.items()}


def trains_as_the_model() -> list[float]:
    parallel, reference = real_mlp()
    with pytest.raises(MeshError, match="before the first capture"):
        parallel.parameters().__next__()
    parallel.prepare((), share(global_batch()))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (parallel, reference)]
    worst = []
    for step in range(4):
        losses, norms = [], []
        for module, optimizer in zip((parallel, reference), optimizers, strict=True):
            optimizer.zero_grad()
            batch = global_batch(step)
            loss = module(**(share(batch) if module is parallel else batch))["loss"]
            loss.backward()
            clip = (
                parallel.clip_grad_norm_
                if module is parallel
                else lambda bound, module=module: torch.nn.utils.clip_grad_norm_(module.parameters(), bound)
            )
            norms.append(clip(0.1))
            optimizer.step()
            losses.append(loss.detach())
        worst.append(max(abs(float(losses[0] - losses[1])), abs(float(norms[0] - norms[1]))))
    for (name, parameter), (_, theirs) in zip(parallel.named_parameters(), reference.named_parameters(), strict=True):
        assert (
            isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor) and parameter.to_local().numel() == theirs.numel() // 2
        ), name
    full = parallel.full_state_dict()
    worst += [float((full[name] - value).abs().max()) for name, value in reference.state_dict().items()]
    with torch.no_grad():
        worst.append(abs(float(parallel(**share(global_batch()))["loss"] - reference(**global_batch())["loss"])))
    return worst


def test_training_on_four_ranks_follows_the_model(gloo_ranks: Any) -> None:
    results = gloo_ranks.run(trains_as_the_model)
    assert max(max(worst) for worst in results) < 1e-5, results


def loads_full_and_sharded() -> None:
    parallel, reference = real_mlp()
    parallel.prepare((), share(global_batch()))
    doubled = {name: value * 2 for name, value in reference.state_dict().items()}
    parallel.load_state_dict(doubled)
    torch.testing.assert_close(dict(parallel.full_state_dict()), doubled)
    assert isinstance(parallel.state_dict()["fc.weight"], DTensor)
    torch.testing.assert_close(parallel.state_dict()["fc.weight"].full_tensor(), doubled["fc.weight"])
    sharded = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.load_state_dict({name: value * 0 for name, value in doubled.items()})
    parallel.load_state_dict(sharded)
    torch.testing.assert_close(dict(parallel.full_state_dict()), doubled)
    with pytest.raises(RuntimeError, match="size mismatch"):
        parallel.load_state_dict({name: torch.ones(3, 3) for name in doubled})


def test_state_loads_from_full_and_from_sharded_values(gloo_ranks: Any) -> None:
    gloo_ranks.run(loads_full_and_sharded)


def ranks_pass_different_shares() -> str:
    parallel, _ = real_mlp()
    batch = share(global_batch())
    batch["y"] = batch["y"] + (dist.get_rank() == 1)
    with pytest.raises(InputError) as caught:
        parallel(**batch)
    return str(caught.value)


def ranks_pass_different_constants() -> str:
    parallel, _ = real_mlp(batch_dims={"x": 0, "y": 0})
    batch = share(global_batch())
    batch["scale"] = torch.tensor(float(dist.get_rank() == 2))
    with pytest.raises(InputError) as caught:
        parallel(**batch)
    return str(caught.value)


def ranks_pass_different_shapes() -> str:
    parallel, _ = real_mlp()
    rows = 1 + (dist.get_rank() == 3)
    with pytest.raises(InputError) as caught:
        parallel(x=torch.ones(rows, WIDTH), y=torch.ones(rows, WIDTH))
    return str(caught.value)


def one_rank_passes_a_short_last_batch() -> str:
    parallel, _ = real_mlp()
    parallel(**share(global_batch()))["loss"].backward()
    short = {name: value[: 1 + (dist.get_rank() != 3)] for name, value in share(global_batch()).items()}
    with pytest.raises(InputError) as caught:
        parallel(**short)
    parallel(**share(global_batch()))["loss"].backward()  # nothing is left half done
    return str(caught.value)


def one_rank_is_in_another_mode() -> str:
    parallel, _ = real_mlp()
    parallel(**share(global_batch()))
    with torch.set_grad_enabled(dist.get_rank() != 1), pytest.raises(InputError) as caught:
        parallel(**share(global_batch()))
    return str(caught.value)


def one_ranks_inputs_are_refused() -> str:
    parallel, _ = real_mlp()
    batch = share(global_batch())
    batch["x"].requires_grad_(dist.get_rank() == 2)
    with pytest.raises(InputError) as caught:
        parallel(**batch)
    return str(caught.value)


def ranks_pass_different_shares_to_a_later_capture() -> str:
    parallel, _ = real_mlp()
    batch = share(global_batch())
    parallel(**batch)
    batch["y"] = batch["y"] + (dist.get_rank() == 1)
    with torch.no_grad(), pytest.raises(InputError) as caught:
        parallel(**batch)
    return str(caught.value)


def ranks_compile_different_programs() -> str:
    parallel, _ = real_mlp()
    ours = parallel._capture

    def capture(*args: Any, **kwargs: Any) -> Compiled:
        compiled = ours(*args, **kwargs)
        if dist.get_rank() == 1:
            compiled.schedule.fragments["forward2"] = schedule_of("PAUSE", forward2=lambda out, y: ((out * y).sum(),)).fragments["forward2"]
        return compiled

    parallel._capture = capture
    with pytest.raises(ScheduleError) as caught:
        parallel(**share(global_batch()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ranks_pass_different_shares, "'y' differs between ranks 0 and 1, which must pass the same share of the batch"),
        (ranks_pass_different_constants, "'scale' differs between ranks 0 and 2, which must pass the same value"),
        (ranks_pass_different_shapes, "ranks 2 and 3 pass 'x' of different shapes"),
        (ranks_pass_different_shares_to_a_later_capture, "'y' differs between ranks 0 and 1"),
        (one_rank_passes_a_short_last_batch, "ranks 2 and 3 pass 'x' of different shapes"),
        (one_rank_is_in_another_mode, "ranks 0 and 1 make different calls, in grad mode (True and False). Every rank makes each call"),
        (one_ranks_inputs_are_refused, "rank 2: the inputs of this call cannot run on the mesh:\n  'x' requires grad"),
        (ranks_compile_different_programs, "ranks 0 and 1 compiled different programs"),
    ],
)
def test_ranks_that_disagree_are_named_on_every_rank(gloo_ranks: Any, function: Any, expected: str) -> None:
    for text in gloo_ranks.run(function):
        assert expected in text


def leaves_before_the_first_collective(where: str) -> str:
    """Rank 3 does not call the module, or is lost while it captures; what the others hear of it."""
    parallel, _ = real_mlp(timeout=1 if where == "call" else 60)
    ours, is_lost = parallel._capture, dist.get_rank() == 3

    def capture(*args: Any, **kwargs: Any) -> Compiled:
        if is_lost:
            raise ZeroDivisionError
        return ours(*args, **kwargs)

    parallel._capture = capture
    if where == "capture" or not is_lost:
        with pytest.raises(AutoparError) as caught:
            parallel(**share(global_batch()))
    dist.barrier()
    return "" if where == "call" and is_lost else str(caught.value)


def test_a_rank_that_does_not_call_is_named(gloo_ranks: Any) -> None:
    others = ("ranks 1, 2, 3", "ranks 0, 2, 3", "ranks 0, 1, 3")
    for rank, (text, named) in enumerate(zip(gloo_ranks.run(leaves_before_the_first_collective, "call"), others, strict=False)):
        assert text.startswith(f"rank {rank} got no answer from {named} for a comparison of the ranks' calls: "), text
        assert f"Look at the output of {named} first" in text


def test_what_a_rank_alone_raises_while_it_captures_is_told_to_all(gloo_ranks: Any) -> None:
    assert gloo_ranks.run(leaves_before_the_first_collective, "capture") == 4 * ["rank 3: ZeroDivisionError: "]


def weighs_its_own_loss() -> float:
    parallel, reference = real_mlp()
    weight = 1.0 + 2 * (dist.get_rank() // 2)
    (weight * parallel(**share(global_batch()))["loss"]).backward()
    (2 * reference(**global_batch())["loss"]).backward()  # the mean of 1 and 3
    gradient = parallel._world.full(parallel.get_parameter("fc.weight").grad, "fc.weight")
    return float((gradient - reference.fc.weight.grad).abs().max())


def test_tangents_of_a_whole_output_are_averaged_over_dp(gloo_ranks: Any) -> None:
    assert max(gloo_ranks.run(weighs_its_own_loss)) < 1e-6


@pytest.mark.parametrize("fakes", [(0,), (1,), (0, 1)])
def test_parameters_on_meta_on_any_rank_are_refused_on_all(fakes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = Mlp()
    models = [copy.deepcopy(whole).to("meta") if rank in fakes else whole for rank in range(2)]
    brought: list[Any] = []
    for model in models:  # what each brings, whatever it is answered
        with pytest.raises(RuntimeError, match="stop"):
            check_equal_models(model, lambda mine, what: (brought.append(mine), stop())[1])
    for model in models:
        with pytest.raises(MeshError, match=f"2 parameters are on meta on rank {fakes[0]}, the first is 'fc.weight'.*weights="):
            check_equal_models(model, lambda *_: brought)


def stop() -> Any:
    raise RuntimeError("stop")


def test_a_real_mesh_needs_a_launcher() -> None:
    device_mesh = type("Mesh", (), {"mesh_dim_names": ("dp",), "mesh": torch.arange(2), "device_type": "cpu"})()
    with pytest.raises(MeshError, match="torchrun"):
        ProcessGroups(device_mesh)
