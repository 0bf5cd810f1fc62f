"""What torch cannot write in place of split parameters, and what it says of plain tensors beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError
from tests.support.models.stages import TwoLayers


def gradient(dim: int = 0) -> DTensor:
    """That of a parameter of which a dim lies on four ranks."""
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.randn(2, 8, dtype=torch.float64)
    parallel = autopar.compile(TwoLayers(), mesh, backend="eager", zero=3, example_inputs=(x,))
    parallel(x).backward()
    found = parallel.get_parameter("a.weight").grad
    assert isinstance(found, DTensor)
    return found if dim == 0 else found.redistribute(placements=[Shard(dim)])


def whole(tensor: Any) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def written() -> list[float]:
    """How far norms that are written in place are off."""
    split = gradient()
    plain = split.full_tensor()
    gaps = []
    for written, wanted in (
        (split.norm(2).clamp_(min=1e3).mul_(3), plain.norm(2).clamp_(min=1e3).mul_(3)),
        (split.norm(2).add_(1e-3).sqrt_(), plain.norm(2).add_(1e-3).sqrt_()),
        (split.norm(2, dim=0, keepdim=True).clamp_(min=0.05), plain.norm(2, dim=0, keepdim=True).clamp_(min=0.05)),
        (split.norm(2, dim=1, keepdim=True).clamp_(min=0.05), plain.norm(2, dim=1, keepdim=True).clamp_(min=0.05)),
    ):
        gaps.append(float((whole(written) - wanted).abs().max()))
    norms = torch._foreach_norm([split, 2 * split])
    torch._foreach_add_(norms, 1e-3)
    gaps += [float((whole(norm) - factor * plain.norm() - 1e-3).abs()) for norm, factor in zip(norms, (1, 2), strict=True)]
    return gaps


def test_a_norm_of_which_ranks_hold_parts_is_written_in_place(gloo_ranks: Any) -> None:
    assert max(max(each) for each in gloo_ranks.run(written)) < 1e-12


def shown_elsewhere() -> str:
    sums = gradient().sum(0)
    try:
        sums[:3].clamp_(min=0.05)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_sum_that_another_tensor_shows_is_not(gloo_ranks: Any) -> None:
    assert all("Please use the out-of-place version" in text for text in gloo_ranks.run(shown_elsewhere))


def mixed() -> tuple[list[str], float]:
    """What is said of plain tensors beside a gradient, and how far the way that it names is off."""
    split = gradient()
    plain, said = split.full_tensor(), []
    ways = [lambda: torch.eye(16).mul_(0.01).add_(split @ split.T), lambda: torch.eye(16) @ split, lambda: torch.zeros(16, 8).copy_(split)]
    for compute in ways:
        try:
            compute()
            said.append("")
        except RuntimeError as error:
            said.append("\n".join(getattr(error, "__notes__", [])))
    found = distribute_tensor(torch.eye(16, dtype=plain.dtype), split.device_mesh)
    found += split @ split.T
    return said, float((found.full_tensor() - torch.eye(16) - plain @ plain.T).abs().max())


def test_an_error_about_a_plain_tensor_beside_a_split_one_says_what_to_do(gloo_ranks: Any) -> None:
    for said, gap in gloo_ranks.run(mixed):
        assert all("distribute_tensor(x, p.device_mesh)" in text and "full_state_dict()" in text for text in said), said
        assert gap < 1e-12


def loaded() -> tuple[str, str, bool]:
    """What is said where a plain model loads what lies on ranks, and a layer what is plain; and whether parameters are given back all at
    once."""
    torch.manual_seed(0)
    mesh, x, said = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), torch.randn(2, 8, dtype=torch.float64), ""
    parallel = autopar.compile(TwoLayers(), mesh, backend="eager", zero=3, example_inputs=(x,))
    try:
        TwoLayers().load_state_dict(parallel.state_dict())
    except RuntimeError as error:
        said = str(error)
    layer = next(parallel.children())
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict({name: torch.zeros(each.shape) for name, each in layer.state_dict().items()})
    parameters = [each.data for each in parallel.parameters()]
    before = [each.clone() for each in parameters]
    torch._foreach_add_(parameters, 1.0)
    torch._foreach_copy_(parameters, before)
    return (
        said,
        str(caught.value),
        all(torch.equal(each.full_tensor(), old.full_tensor()) for each, old in zip(parallel.parameters(), before, strict=True)),
    )


def test_a_plain_model_is_told_of_plain_values_and_parameters_are_copied_all_at_once(gloo_ranks: Any) -> None:
    for of_plain, of_layer, is_equal in gloo_ranks.run(loaded):
        assert "parallel.full_state_dict() is plain" in of_plain and is_equal
        assert "parallel.load_state_dict takes whole values by the names in the model, of some alone with strict=False" in of_layer


def zeroed() -> tuple[bool, bool]:
    """Whether zeroing before the first call clears what the model has, and after it what lies on ranks."""
    model = TwoLayers()
    model(torch.ones(2, 8, dtype=torch.float64)).backward()
    parallel = autopar.compile(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), backend="eager")
    parallel.zero_grad()
    before = all(each.grad is None for each in model.parameters())
    parallel(torch.ones(2, 8, dtype=torch.float64)).backward()
    assert all(each.grad is not None for each in parallel.parameters())
    parallel.zero_grad()
    return before, all(each.grad is None for each in parallel.parameters())


def test_gradients_are_zeroed_before_the_first_call_and_after(gloo_ranks: Any) -> None:
    assert all(each == (True, True) for each in gloo_ranks.run(zeroed))


def in_torchs_tables() -> bool:
    before = torch.ops.aten.normal_.default, torch.ops.aten.add_.Tensor
    gradient()
    return before == (torch.ops.aten.normal_.default, torch.ops.aten.add_.Tensor)


def test_ops_that_are_taken_over_are_those_that_torch_knows(gloo_ranks: Any) -> None:
    assert all(gloo_ranks.run(in_torchs_tables))


def filled(axis: int) -> tuple[bool, str]:
    """Whether a column that is given a number is that of one device; and what is said where torch has gathered it."""
    split = gradient(axis)
    plain, said = split.full_tensor(), ""
    with torch.no_grad():
        plain[:, 2] = 5
        try:
            split[:, 2] = 5
        except AutoparError as error:
            said = str(error)
    return torch.equal(split.full_tensor(), plain), said


def test_a_column_is_given_a_number(gloo_ranks: Any) -> None:
    assert all(each == (True, "") for each in gloo_ranks.run(filled, 0))


def filled_by_a_number() -> bool:
    """Whether a column is given what all ranks hold as one tensor of theirs, and the bool of all ranks."""
    split = gradient()
    plain, greatest = split.full_tensor(), split.max().redistribute(placements=[Replicate()])
    with torch.no_grad():
        for index, of in ((2, greatest), (3, (split > 0).any())):
            plain[:, index] = of.full_tensor()
            split[:, index].fill_(of)
    return torch.equal(split.full_tensor(), plain)


def test_a_column_is_given_a_number_that_all_ranks_hold(gloo_ranks: Any) -> None:
    assert all(gloo_ranks.run(filled_by_a_number))


def test_a_column_that_is_split_is_not_given_a_number(gloo_ranks: Any) -> None:
    assert all("Write into the whole" in text for _, text in gloo_ranks.run(filled, 1))


def bools(axis: int) -> list[bool]:
    """Whether numbers made of bools of a gradient are those of the whole."""
    found, whole = gradient(axis), gradient(axis).full_tensor()
    made = (
        lambda p: (p > 0).any().int(),
        lambda p: (p > 0).any(0).long().sum(),
        lambda p: (p > 0).byte().any(0).long().sum(),
        lambda p: (p > 0).any(1).float() * 0.5,
        lambda p: (p > 0).any(0).double().mean(),
        lambda p: 1 - (p > 0).any().int(),
        lambda p: p * (p > 0).any(),
        lambda p: torch.stack([(p > 0).any(), (p < 0).any()]).sum(),
        lambda p: (~(p > 0).any()).float(),
        lambda p: (~torch.isfinite(p).all()).float(),
        lambda p: ((p > 0).any() ^ (p < -9).any()).int(),
        lambda p: torch.where((p > 0).any(0), 2.0, 1.0).sum(),
    )
    return [torch.equal(make(found).full_tensor(), make(whole)) for make in made]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_number_made_of_a_bool_does_not_count_ranks(gloo_ranks: Any, axis: int) -> None:
    assert all(all(each) for each in gloo_ranks.run(bools, axis))


def unknown() -> list[str]:
    """What is said of what torch does not compute of split tensors."""
    split, said = gradient(), []
    for compute in (
        lambda: split.renorm(2, 0, 1.0),
        lambda: split[split > 0],
        lambda: split.quantile(0.5, dim=0),
        lambda: torch.unique(split),
    ):
        try:
            compute()
            said.append("")
        except RuntimeError as error:
            said.append("\n".join(getattr(error, "__notes__", [])))
    return said


def test_an_error_about_what_torch_does_not_compute_says_what_to_do(gloo_ranks: Any) -> None:
    for said in gloo_ranks.run(unknown):
        assert all("p.full_tensor()" in text for text in said), said


def own_collectives() -> list[str]:
    """What is said to loops that keep copies of a model alike themselves."""
    split, said = gradient(), []
    for collective in (
        lambda: dist.all_reduce(split),
        lambda: dist.broadcast(split.detach(), 0),
        lambda: dist.all_reduce(split.norm()),
        lambda: dist.all_gather([torch.zeros_like(split)] * 4, split),
        lambda: nn.parallel.DistributedDataParallel(nn.ParameterList([nn.Parameter(split)])),
    ):
        with pytest.raises(AutoparError) as refused:
            collective()
        said.append(str(refused.value))
    return said


def test_collectives_of_a_loop_s_own_are_refused_in_words(gloo_ranks: Any) -> None:
    for said in gloo_ranks.run(own_collectives):
        assert all("does not know DTensors" in text and "Leave the line out" in text for text in said), said


def mean_of_unequal_parts() -> tuple[str, float]:
    """What is said of a mean that torch would make of those of the parts; and how far the way that it names is off."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.randn(13, 8, dtype=torch.float64)
    split, said = distribute_tensor(whole, mesh, [Shard(0)]), ""
    try:
        F.mse_loss(split, split * 2)
    except AutoparError as error:
        said = str(error)
    return said, float((((split - split * 2) ** 2).mean().full_tensor() - F.mse_loss(whole, whole * 2)).abs())


def test_a_mean_is_not_that_of_the_means_of_unequal_parts(gloo_ranks: Any) -> None:
    for said, gap in gloo_ranks.run(mean_of_unequal_parts):
        assert "((p - q) ** 2).mean()" in said and gap < 1e-12
