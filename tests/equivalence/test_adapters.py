"""Low-rank adapters beside frozen weights: exact, split, and only the adapters have gradients, traffic and optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import ParallelModule
from tests.support.captures import compiled

WIDTH = 16


class Adapted(nn.Module):
    """A frozen linear layer with adapters by name, held as peft holds them; names have dots, brackets and quotes."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scale = nn.ParameterDict({"default": torch.ones(base.out_features), "['x']": torch.ones(base.out_features)})
        # Beside `scale.default`: with its dot written as an underscore the name would be the same.
        self.scale_default = nn.Parameter(torch.ones(base.out_features))
        self.scaling = {"default": [0.5, 2.0]}

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name, down in self.lora_A.items():
            change = self.lora_B[name](down(x)) * torch.tensor(self.scaling[name]).sum()  # a constant of the captured graph
            result = result + change * self.scale[name] * self.scale["['x']"]
        return result * self.scale_default


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: Adapted(nn.Linear(WIDTH, WIDTH)) for name in ("up", "down")})
        self.head = nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for each in self.adapters.values():
            x = torch.relu(each(x))
        return F.cross_entropy(self.head(x), labels)


BATCH = {"x": torch.randn(8, WIDTH), "labels": torch.arange(8)}


def assert_only_adapters_train(parallel: ParallelModule, batch: dict[str, Tensor]) -> None:
    """Gradients, their bytes, the optimizer's, and what dp sends of them are those of the parameters that train."""
    parallel.zero_grad()
    loss: Any = parallel(**batch)
    getattr(loss, "loss", loss).backward()
    trained = {name for name, parameter in parallel.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in parallel.named_parameters() if parameter.grad is not None} == trained
    signature, mesh = parallel.compiled.local.signature, parallel.compiled.local.mesh
    held = [item for item in signature.inputs_of("parameter") if item.requires_grad]
    assert {item.name for item in held} == trained
    local_bytes = sum(4 * torch.Size(item.sharding.local_shape(item.dims, mesh)).numel() for item in held if item.sharding is not None)
    summary = parallel.summary()
    assert summary["memory"]["gradients"] == local_bytes
    assert 2 * local_bytes <= summary["memory"]["optimizer_state"] <= 2 * local_bytes + 8 * len(held)  # two moments, and a step count each
    sent = summary["communication"].get("dp", {})
    num_ranks = mesh.num_shares
    assert sum(each["backward"] for each in sent.values()) <= 2 * local_bytes * (num_ranks - 1) / num_ranks  # one all-reduce of each


@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_adapters_by_name(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    parallel = compiled(Net(), axes, BATCH)
    assert parallel.verify(**BATCH, promote=True)
    assert parallel.summary()["flops_split"] > 0.99
    if "pp" not in axes:
        assert_only_adapters_train(parallel, BATCH)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.1}, {"trainable_token_indices": [1, 2]}], ids=str)
def test_peft(options: dict[str, Any]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=96, use_cache=False, **sizes))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    ids = torch.randint(0, 96, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    parallel = compiled(peft.get_peft_model(model, config), {"dp": 2, "tp": 2}, batch)
    assert parallel.verify(**batch, promote=True)
    assert parallel.summary()["flops_split"] > 0.99
    assert_only_adapters_train(parallel, batch)
