"""Weights to and from what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import CheckpointError


def gpt2(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=False, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 4_000])
def test_transformers_writes_and_reads_what_we_read_and_write(tmp_path: Path, max_file_bytes: int) -> None:
    original, model = gpt2(0), gpt2(1)
    original.save_pretrained(tmp_path / "hub", max_shard_size=max_file_bytes)
    parallel = autopar.compile(model, autopar.virtual_mesh(tp=2), backend="eager")
    autopar.import_safetensors(tmp_path / "hub", parallel)
    assert are_equal(original, model) and model.lm_head.weight is model.transformer.wte.weight
    autopar.save(tmp_path / "run", parallel)
    exported = autopar.export_safetensors(tmp_path / "run", tmp_path / "exported", max_file_bytes=max_file_bytes)
    original.config.save_pretrained(exported)
    again = GPT2LMHeadModel.from_pretrained(exported)
    assert are_equal(original, again) and again.lm_head.weight is again.transformer.wte.weight
    assert (len(list(exported.glob("*.safetensors"))) == 1) == (max_file_bytes > 1e6)
    with pytest.raises(CheckpointError, match="is there already: export into a new folder"):
        autopar.export_safetensors(tmp_path / "run", exported, max_file_bytes=max_file_bytes)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = gpt2(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = autopar.compile(model, autopar.virtual_mesh(tp=2), backend="eager")
    file, weights = tmp_path / "w.safetensors", dict(gpt2(0).state_dict())
    head = weights.pop("lm_head.weight")
    safetensors.torch.save_file({**weights, "lm_head.weight": head + 1}, file)
    with pytest.raises(CheckpointError, match="'lm_head.weight' and 'transformer.wte.weight' are tied in the model, and differ there"):
        autopar.import_safetensors(file, parallel)
    safetensors.torch.save_file({name: value.half() for name, value in weights.items()}, file)
    with pytest.raises(
        CheckpointError, match=r"'transformer.h.0.attn.c_attn.bias' is float16\[48\] there and float32\[48\] here \(cast=True"
    ):
        autopar.import_safetensors(file, parallel)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../w.safetensors"}}))
    with pytest.raises(CheckpointError, match="names no files beside it"):
        autopar.import_safetensors(tmp_path, parallel)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    autopar.import_safetensors(file, parallel, cast=True)
    del weights["transformer.wte.weight"]  # the name that is left will do
    safetensors.torch.save_file({**weights, "lm_head.weight": head.contiguous()}, file)
    autopar.import_safetensors(file, parallel)
    assert torch.equal(model.transformer.wte.weight, head)
