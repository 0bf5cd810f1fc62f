"""Which of timm's families, and of peft's adapters, autopar captures, splits and gets right: a Markdown row a model.

    pip install --no-deps timm peft accelerate psutil
    python -m benchmarks.zoo_timm                          all, on tp2 and dp2×tp2
    python -m benchmarks.zoo_timm vit lora_llama --mesh tp2
    python -m benchmarks.zoo_timm vit --docs docs/zoo-timm.md   the same, put into that page's table; its other lines stay

Small configurations with random weights, a training step with cross entropy, planned on the ideal cluster. timm asks for
torchvision and Pillow when it is imported, for image files and transforms that nothing here uses: where they are not installed, empty
modules stand in for them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import Outcome, measured

MESHES = {"tp2": {"tp": 2}, "dp2×tp2": {"dp": 2, "tp": 2}}
CLASSES, BATCH = 16, 4
# By family: a model of timm by name or as file:class, the size of its images, and what makes it small.
FAMILIES: dict[str, tuple[str, int, Mapping[str, Any]]] = {
    "resnet": ("resnet10t", 64, {}),
    "resnext": ("resnext50_32x4d", 64, {"layers": (1, 1, 1, 1)}),
    "res2net": ("res2net50_26w_4s", 64, {"layers": (1, 1, 1, 1)}),
    "seresnet": ("seresnet18", 64, {"layers": (1, 1, 1, 1)}),
    "regnet": ("regnetx_002", 64, {}),
    "efficientnet": ("efficientnet_lite0", 64, {}),
    "mobilenetv3": ("mobilenetv3_small_050", 64, {}),
    "ghostnet": ("ghostnet_050", 64, {}),
    "repvgg": ("repvgg_a0", 64, {}),
    "vgg": ("vgg:VGG", 64, {"cfg": (16, "M", 32, "M", 64, "M")}),
    "densenet": ("densenet121", 64, {"block_config": (2, 2), "growth_rate": 16}),
    "inception": ("inception_v3", 96, {}),
    "xception": ("xception41", 64, {}),
    "nfnet": ("nf_resnet26", 64, {}),
    "convnext": ("convnext_atto", 64, {"depths": (1, 1, 1, 1), "dims": (16, 32, 64, 128)}),
    "edgenext": ("edgenext_xx_small", 64, {}),
    "poolformer": ("metaformer:MetaFormer", 64, {"depths": (1, 1, 1, 1), "dims": (32, 64, 96, 128)}),
    "vit": ("vit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "deit": ("deit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "beit": ("beit_base_patch16_224", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "cait": ("cait_xxs24_224", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "xcit": ("xcit_nano_12_p8_224", 32, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        32,
        {"img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "mixer": ("mlp_mixer:MlpMixer", 32, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_blocks": 2}),
    "levit": ("levit_128s", 64, {"img_size": 64, "depth": (1, 1, 1)}),
    "pvt": ("pvt_v2_b0", 64, {"depths": (1, 1, 1, 1)}),
    "coatnet": ("coatnet_pico_rw_224", 64, {"img_size": 64}),
    "sequencer": (
        "sequencer2d_s",
        56,
        {"layers": (1, 1), "patch_sizes": (7, 2), "embed_dims": (32, 64), "hidden_sizes": (8, 16), "mlp_ratios": (3.0, 3.0)},
    ),
    "maxvit": ("maxvit_pico_rw_256", 64, {"img_size": 64}),
}
HEAD = ["| model | mesh | worst error | `flops_split` | replicated |", "| --- | --- | --- | --- | --- |"]
ADAPTERS = ("lora_gpt2", "lora_llama", "lora_bert")


class Classifier(nn.Module):
    """A model of timm with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


def image_model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with_empty_modules("torchvision", "PIL")
    timm: Any = importlib.import_module("timm")
    name, size, options = FAMILIES[family]
    file, _, kind = name.rpartition(":")
    if file:
        model = getattr(importlib.import_module(f"timm.models.{file}"), kind)(num_classes=CLASSES, **options)
    else:
        model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    batch = {"images": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}
    return Classifier(model), batch


def adapted_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    peft: Any = importlib.import_module("peft")
    hf: Any = importlib.import_module("transformers")
    ids = torch.randint(0, 96, (BATCH, 16))
    batch = {"input_ids": ids, "labels": ids}
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 96}
    if name == "lora_gpt2":
        config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=96, n_positions=32, use_cache=False)
        model, targets, task = hf.GPT2LMHeadModel(config), ["c_attn", "c_proj"], "CAUSAL_LM"
    elif name == "lora_llama":
        config = hf.LlamaConfig(num_key_value_heads=2, use_cache=False, **sizes)
        model, targets, task = hf.LlamaForCausalLM(config), ["q_proj", "v_proj", "down_proj"], "CAUSAL_LM"
    else:
        model, targets, task = hf.BertForSequenceClassification(hf.BertConfig(num_labels=4, **sizes)), ["query", "value"], "SEQ_CLS"
        batch["labels"] = torch.randint(0, 4, (BATCH,))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type=task, fan_in_fan_out=name == "lora_gpt2"))
    for module in adapted.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return adapted, batch


def outcome(name: str, mesh: str) -> Outcome:
    torch.manual_seed(0)
    make: Callable[[str], tuple[nn.Module, dict[str, Tensor]]] = adapted_model if name in ADAPTERS else image_model
    try:
        model, batch = make(name)
    except Exception as error:  # every model gets its line
        return Outcome(name, mesh, 0.0, failure=f"not built: {type(error).__name__}: {error}")
    return measured(name, model, batch, mesh, MESHES[mesh])


# ---- the table


def row(found: Outcome) -> str:
    state = found.failure or f"{found.error:.1e}{'' if found.is_exact else ' **not exact**'}"
    split = "" if found.flops_split is None else f"{found.flops_split:.3f}"
    ops = ", ".join(f"`{op}`" for op in found.replicated[:4])
    return f"| {found.name} | {found.mesh} | {state} | {split} | {ops} |"


def with_rows(page: str, rows: Sequence[str]) -> str:
    """`page` with these rows in its table: in place of those of the same model and mesh, the others behind its last row."""
    new = {_model_and_mesh(line): line for line in rows}
    lines = [new.pop(_model_and_mesh(line), line) if line.startswith("|") else line for line in page.splitlines()]
    end = max((index + 1 for index, line in enumerate(lines) if line.startswith("|")), default=len(lines))
    head = [] if any(line.startswith("|") for line in lines) else HEAD
    return "\n".join([*lines[:end], *head, *new.values(), *lines[end:]]) + "\n"


def _model_and_mesh(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|")[1:3])


# ---- stand-ins for what timm imports and nothing here uses


class _Empty(type):
    """A class whose attributes are classes of this kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Empty(name, (), {})
        setattr(cls, name, found)
        return found


class _EmptyModule(types.ModuleType):
    __path__ = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        return getattr(_Empty(self.__name__, (), {}), name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def with_empty_modules(*names: str) -> None:
    """From now on the packages of these names that are not installed can be imported, and hold nothing."""
    missing = tuple(name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_Finder(missing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join([*FAMILIES, *ADAPTERS]))
    parser.add_argument("--mesh", choices=MESHES, nargs="*", default=list(MESHES))
    parser.add_argument("--docs", type=Path, help="put the rows into the table of this page")
    options = parser.parse_args()
    print("\n".join(HEAD))
    for name in options.names or [*FAMILIES, *ADAPTERS]:
        for mesh in options.mesh:
            line = row(outcome(name, mesh))
            print(line, flush=True)
            if options.docs:
                options.docs.write_text(with_rows(options.docs.read_text() if options.docs.exists() else "", [line]))


if __name__ == "__main__":
    main()
