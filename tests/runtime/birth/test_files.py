"""Models on meta that get their values from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import CaptureError, WeightsError
from autopar.ir.mesh import virtual_mesh
from autopar.ir.padding import Padding
from autopar.ir.sharding import Sharding
from autopar.runtime.birth.files import Files
from autopar.runtime.module.parameters import Placement
from autopar.runtime.module.placement import held_part
from tests.support.captures import compiled
from tests.support.models.zoo import ZOO, Case
from tests.support.ranks import share


def on_meta(case: Case) -> Any:
    model: Any = case.model
    with torch.device("meta"):
        return type(model)(model.config).train()


def saved(name: str, folder: Path) -> Case:
    """A model of transformers', in files as it writes them: several, with an index."""
    case = ZOO[name](num_layers=2).to(torch.float32)
    model: Any = case.model
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return case


@pytest.mark.parametrize("name", ZOO)
def test_a_model_is_as_it_was_saved(name: str, tmp_path: Path) -> None:
    case = saved(name, tmp_path)
    parallel = compiled(on_meta(case), {"dp": 2, "tp": 2}, weights=tmp_path)
    wanted = dict(case.model.named_parameters()) | dict(case.model.named_buffers())
    found = dict(parallel.named_parameters()) | dict(parallel.named_buffers())
    assert found.keys() == wanted.keys() and all(torch.equal(found[each], wanted[each]) for each in wanted)


def on_ranks(name: str, folder: str, axes: dict[str, int]) -> tuple[dict[str, Tensor], float]:
    case = ZOO[name](num_layers=2).to(torch.float32)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    parallel = compiled(on_meta(case), mesh, weights=folder)
    loss = float(parallel(**share(case.batch, mesh)).loss.detach())
    return parallel.full_state_dict(), loss


@pytest.mark.parametrize(
    ("name", "axes"), [("gpt2", {"dp": 2, "tp": 2}), pytest.param("llama", {"pp": 2, "tp": 2}, marks=pytest.mark.slow)]
)
def test_ranks_read_their_parts(gloo_ranks: Any, name: str, axes: dict[str, int], tmp_path: Path) -> None:
    case = saved(name, tmp_path)
    loss = float(case.model(**case.batch).loss.detach())
    for state, found in gloo_ranks.run(on_ranks, name, str(tmp_path), axes):
        assert all(torch.equal(state[each], tensor) for each, tensor in case.model.named_parameters())
        assert found == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("dims", "splits", "padding"),
    [
        (((4, 2), (3, 4, 2)), (("tp",), (), (), ("dp",), ()), None),  # two boxes of each of three thirds
        (((6,), (5,)), (("dp", "tp"), ()), None),
        (((8,), (5,)), (("tp",), ()), Padding(((6,), (5,)), ((8,), (5,)))),
        ((), (), None),
    ],
)
def test_a_part_is_read_box_by_box(dims: Any, splits: Any, padding: Padding | None, tmp_path: Path) -> None:
    mesh = virtual_mesh(dp=2, tp=2)
    if dims == ((6,), (5,)):
        mesh = virtual_mesh(dp=3, tp=2)
    placement = Placement(dims, Sharding(splits), mesh, padding)
    whole = torch.arange(float(torch.Size(placement.shape).numel())).reshape(placement.shape)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(placement.shape, device="meta"))
    files = Files(model, tmp_path)
    for rank in range(mesh.size):
        assert torch.equal(files.part("weight", placement, rank), held_part(whole, placement, rank))


def test_names_may_lack_the_base_models_prefix_and_ties_have_either_name(tmp_path: Path) -> None:
    case = ZOO["gpt2"]().to(torch.float32)
    state = {name.removeprefix("transformer."): each.detach() for name, each in case.model.named_parameters(remove_duplicate=False)}
    state["lm_head.weight"] = state.pop("wte.weight").clone()
    save_file(state, tmp_path / "model.safetensors")
    parallel = compiled(on_meta(case), {"dp": 2}, weights=tmp_path / "model.safetensors")
    assert parallel.transformer.wte.weight is parallel.lm_head.weight
    assert torch.equal(parallel.lm_head.weight, case.model.lm_head.weight)


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype))


def test_a_model_with_values_gets_others_in_their_places(tmp_path: Path) -> None:
    model, other = layers(), layers()
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    weight = model[0].weight
    compiled(model, {"dp": 2}, weights=tmp_path)
    assert model[0].weight is weight and torch.equal(weight, other[0].weight)


def test_dtypes_are_converted_on_request(tmp_path: Path) -> None:
    save_file(layers(torch.bfloat16).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'0.weight' is float32 in the model, bfloat16 in model.safetensors(.|\n)*cast=True"):
        compiled(layers(), {"dp": 2}, weights=tmp_path)
    parallel = compiled(layers(), {"dp": 2}, weights=autopar.Weights(tmp_path, cast=True))
    assert torch.equal(parallel.get_parameter("0.weight").bfloat16().float(), parallel.get_parameter("0.weight"))


def change(state: dict[str, Tensor], folder: Path, how: str) -> None:
    if how == "missing":
        del state["1.bias"]
    if how == "shape":
        state["0.weight"] = torch.zeros(4, 3)
    if how == "extra":
        state["2.weight"] = torch.zeros(1)
    save_file(state, folder / "model.safetensors")
    if how == "twice":
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        save_file({"1.bias": torch.zeros(2)}, folder / "b.safetensors")
    if how == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
    index = {"outside": "../model.safetensors", "gone": "other.safetensors"}
    if how in index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": index[how]}}))
    if how == "no index":
        (folder / "model.safetensors.index.json").write_text("[]")
    if how == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "'1.bias' is not in the files"),
        ("shape", r"'0.weight' is \[3, 4\] in the model, \[4, 3\] in model.safetensors"),
        ("extra", "'2.weight' in model.safetensors is none of the model's"),
        ("twice", "'1.bias' is in .*a.safetensors and in .*b.safetensors"),
        ("truncated", "model.safetensors is no whole safetensors file"),
        ("outside", r"names the file '../model.safetensors', which does not lie beside it"),
        ("gone", "names the file 'other.safetensors', which does not lie beside it"),
        ("no index", "is no index of safetensors files"),
        ("pickle", "pytorch_model.bin is a pickle, which may run code"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(how: str, message: str, tmp_path: Path) -> None:
    model = layers()
    change({name: each + 1 for name, each in model.state_dict().items()}, tmp_path, how)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        compiled(model, {"dp": 2}, weights=tmp_path)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_files_are_not_held_open_or_shared(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(layers().state_dict(), path)
    model = layers()
    compiled(model, {"dp": 2}, weights=path)
    with torch.no_grad():
        model[0].weight.fill_(9)
    assert not bool((load_file(path)["0.weight"] == 9).any())


class DtypeReader(nn.Module):
    """Reads in Python the dtype that an autocast gives, and makes tensors of it and of literals where the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.arange(8.0))
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h * 2 if h.dtype == torch.bfloat16 else h * 3
        h = h + torch.ones(8, dtype=h.dtype, device=h.device) + torch.tensor([1.0, 2.0] * 4, device=x.device) + self.shift
        h = self.outer(h).relu()
        return (h.to(h.dtype) if self.scale is None else h * self.scale).float().square().mean()


def dtypes_on_ranks(folder: str) -> tuple[float, float, Tensor]:
    """The loss, that of a second program, without gradients, and a gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model, other = DtypeReader(), DtypeReader()
        other.scale = torch.ones(8)
    x = torch.linspace(-1, 1, 32).view(4, 8)[2 * mesh.get_local_rank("dp") :][:2]
    with torch.autocast("cpu", torch.bfloat16):
        parallel = autopar.compile(model, mesh, example_inputs=(x,), weights=folder)
        loss = parallel(x)
        loss.backward()
        with torch.no_grad():
            second = parallel(x[:1])
    with pytest.raises(CaptureError, match="tensor on meta, which has no numbers(?s:.*)h \\* self.scale(?s:.*)register_buffer"):
        autopar.compile(other, mesh, example_inputs=(x,), weights=folder)
    gradient: Any = parallel.get_parameter("inner.weight").grad
    return float(loss.detach()), float(second), gradient.full_tensor()


def test_forward_on_meta_sees_the_device_and_the_dtypes_of_the_run(gloo_ranks: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = DtypeReader(), torch.linspace(-1, 1, 32).view(4, 8)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.autocast("cpu", torch.bfloat16):
        loss, second = model(x), model(x[::2])
        loss.backward()
    wanted: Any = model.inner.weight.grad
    for found, other, gradient in gloo_ranks.run(dtypes_on_ranks, str(tmp_path)):
        assert [found, other] == pytest.approx([loss.item(), second.item()], rel=0.02)
        assert (gradient - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_a_plan_on_meta_sees_the_dtypes_of_an_autocast() -> None:
    with torch.device("meta"):
        model, x = DtypeReader(), torch.empty(4, 8)
    for is_enabled, factor in ((True, 2), (False, 3)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            forward = autopar.compile(model, virtual_mesh(dp=2), example_inputs=(x,)).compiled.forms.forward
        products = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        assert [node.args[1] for node in products] == [factor]
