"""A model on meta is planned as one with values is; it runs once it has some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import InputError, MeshError, ParallelModule, virtual_mesh

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
MESHES = [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embedding(ids) * self.scale * positions[:, None].cos()
        return F.cross_entropy(self.head(x + self.down(torch.relu(self.up(x)))).flatten(0, 1), ids.flatten())


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def with_values() -> Net:
    torch.manual_seed(0)
    return Net()


def parameters_alone_on_meta() -> Net:
    """As accelerate's `init_empty_weights` leaves it: buffers have values."""
    model = on_meta()
    model.scale = torch.full((16,), 0.5)
    return model


def ids(device: str = "cpu") -> Tensor:
    return torch.arange(64, device=device).view(8, 8) % 32


def planned(model: nn.Module, example: Tensor, axes: dict[str, int]) -> ParallelModule:
    return autopar.compile(model, virtual_mesh(**axes), example_inputs=(example,), cluster="8xH100", backend="eager")


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_plan_is_that_of_a_model_with_values(axes: dict[str, int]) -> None:
    wanted = planned(with_values(), ids(), axes)
    cases = ((on_meta(), "meta"), (with_values(), "meta"), (parameters_alone_on_meta(), "cpu"))
    for model, device in cases[:1] if "pp" in axes else cases:
        parallel = planned(model, ids(device), axes)
        assert parallel.plan.to_json() == wanted.plan.to_json()
        assert parallel.summary()["seconds"] == wanted.summary()["seconds"] and parallel.summary()["memory"] == wanted.summary()["memory"]
        assert parallel.explain().splitlines()[0] == wanted.explain().splitlines()[0]
        assert str(parallel.what_if({"up.weight": (None, None)})) and parallel.why("up.weight")
        assert {name: tensor.device for name, tensor in model.state_dict().items()} == {
            name: tensor.device for name, tensor in parallel.state_dict().items()
        }


def refusal(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_what_has_no_values_does_not_run_until_it_has_some() -> None:
    model = on_meta()
    parallel = planned(model, ids("meta"), MESHES[0])
    for call in (parallel, parallel.verify, parallel.timeline):
        text = refusal(MeshError, lambda call=call: call(ids()))
        assert "are on meta or fake, the first is 'embedding.weight'" in text and "to_empty" in text and "parallel.plan.save" in text
    compiled = parallel.compiled
    model.to_empty(device="cpu")
    model.load_state_dict(with_values().state_dict())
    assert "on meta or fake, without values: 'args[0]'" in refusal(InputError, lambda: parallel(ids("meta")))
    parallel(ids()).backward()
    assert parallel.compiled is compiled
    assert parallel.verify(ids(), promote=True)


def test_llama_as_it_is_configured_by_default() -> None:
    """It keeps a cache of keys and values, whose empty tensors the program has as constants: on meta they have no numbers."""
    torch.manual_seed(0)
    real = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **SIZES))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **SIZES))
    plans = []
    for each, device in ((real, "cpu"), (model, "meta")):
        example = {"input_ids": ids(device), "labels": ids(device)}
        parallel = autopar.compile(each, virtual_mesh(**MESHES[0]), example_inputs=example, cluster="8xH100", backend="eager")
        plans.append(parallel.plan.to_json())
        assert parallel.compiled.forms.forward.constants
    assert plans[0] == plans[1]
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    for name, buffer in real.named_buffers():  # which a state does not have
        model.get_buffer(name).copy_(buffer)
    example = {"input_ids": ids(), "labels": ids()}
    torch.testing.assert_close(parallel(**example).loss, real(**example).loss)


class Rotary(nn.Module):
    """Attention over turned queries and keys: fusing what turns them looks at tables of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, use_cache=False, **SIZES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, labels=ids).loss


def test_a_compile_inside_a_fake_mode_plans_as_one_outside() -> None:
    real = Rotary()
    wanted = planned(real, ids(), MESHES[0])
    with FakeTensorMode() as mode:
        for model, example in ((Rotary(), ids()), (real, ids())):
            parallel = planned(model, example, MESHES[0])
            assert parallel.plan.to_json() == wanted.plan.to_json()
            assert parallel.explain() and parallel.summary()["seconds"] == wanted.summary()["seconds"]
            assert str(parallel.what_if({"*.q_proj.weight": (None, None)}))
            assert "in a FakeTensorMode" in refusal(MeshError, lambda parallel=parallel, example=example: parallel(example))
    assert "on meta or fake, without values: 'args[0]'" in refusal(InputError, lambda: parallel(mode.from_tensor(ids())))
    parallel(ids()).backward()
    assert parallel.verify(ids(), promote=True)
