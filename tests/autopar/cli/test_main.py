"""The command line: plans, what is read back of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli.main import main
from benchmarks.published_models import GPT

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
ASKED = ["--cluster", "8xh100:4", "--global-batch", "8", "--tp", "1"]


def small() -> Any:
    """What --model names below."""
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    return GPT(96, 4, 64, 4, 32), {"tokens": tokens, "labels": tokens}


def no_model() -> int:
    return 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def plans(config: Path) -> Path:
    path = config.parent / "plans.json"
    main(["plan", "--model", str(config), "--seq-len", "32", *ASKED, "--json", str(path)])
    return path


def test_a_configuration_of_transformers_is_planned(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plans.read_text())
    assert found["asked"]["global_batch"] == 8 and len(found["plans"]) >= 2
    first = found["plans"][0]
    assert first["fits"] and first["tokens_per_second_per_device"] == pytest.approx(8 * 32 / first["step_seconds"] / 4)
    main(["explain", str(plans)])
    assert "where the time goes" in capsys.readouterr().out
    main(["compare", str(plans), f"{plans}:2"])
    text = capsys.readouterr().out
    assert "2 − 1" in text and "memory" in text


def test_a_function_gives_a_model_and_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", f"{__name__}:small", *ASKED, "--json"])
    assert json.loads(capsys.readouterr().out)["plans"][0]["fits"]


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    assert torch.__version__ in text and "CPU cores" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--model", "{config}", *ASKED], "Pass --seq-len (the model of"),
        (["plan", "--model", "nowhere.json", "--seq-len", "8", *ASKED], "No such file"),
        (["plan", "--model", "{folder}/vit.json", "--seq-len", "8", *ASKED], "is no causal language model"),
        (["plan", "--model", "{folder}/text.json", "--seq-len", "8", *ASKED], "is no JSON"),
        (["plan", "--model", "no.such:thing", *ASKED], "No module named 'no'"),
        (["plan", "--model", f"{__name__}:no_model", *ASKED], "gives a int: return a model"),
        (["plan", "--model", "{config}", "--seq-len", "8", "--cluster", "h100", "--global-batch", "8"], "how many devices?"),
        (["plan", "--model", "{config}", "--seq-len", "-1", *ASKED], "a sample has one token or more"),
        (["plan", "--model", "{folder}/list.json", "--seq-len", "8", *ASKED], "names its model_type"),
        (["plan", "--model", "{config}", "--seq-len", "8", *ASKED, "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["explain", "{config}"], "is no file that `autopar plan --json` wrote"),
        (["explain", "{plans}:99"], "has no plan 99"),
        (["explain", "nowhere.json"], "No such file"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], text: str, config: Path, plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "vit.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    (config.parent / "list.json").write_text("[]")
    (config.parent / "text.json").write_text("layers: 3")
    with pytest.raises(SystemExit) as caught:
        main([each.format(config=config, folder=config.parent, plans=plans) for each in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error, error
