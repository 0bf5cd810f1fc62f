"""The command line: plans, what is read back of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli.main import main
from benchmarks.published_models import GPT
from tests.autopar.doors.test_predict import BatchFirst, Recurrent

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
ASKED = ["--cluster", "8xh100:4", "--global-batch", "8", "--tp", "1"]
HELD = {"parameters", "gradients", "optimizer_state", "activations", "working", "total"}
# Of every plan in every JSON: programs read these names. A change of one wants another VERSION.
PLAN = {
    "mesh": dict, "schedule": str, "num_chunks": int, "num_microbatches": int, "microbatch": int, "zero": int, "recompute": str,
    "offload": dict, "host_bytes": float, "step_seconds": float, "seconds": dict, "samples_per_second": float,
    "tokens_per_second_per_device": float, "mfu": float,
    "memory_bytes": list, "capacity_bytes": float, "fits": bool, "stages": list, "reasons": list,
}  # fmt: skip


def small() -> Any:
    """What --model names below."""
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    return GPT(96, 4, 64, 4, 32), {"tokens": tokens, "labels": tokens}


def no_model() -> int:
    return 3


def raises() -> None:
    raise RuntimeError("no weights today")


def check_plans(values: dict[str, Any], more: frozenset[str] = frozenset()) -> None:
    """As the schema has it."""
    assert values["version"] == 1 and values["plans"]
    for plan in values["plans"]:
        assert plan.keys() == PLAN.keys() | more
        assert all(isinstance(plan[name], kind) for name, kind in PLAN.items())
        assert len(plan["memory_bytes"]) == plan["mesh"].get("pp", 1)
        for held in plan["memory_bytes"]:
            assert held.keys() == HELD and held["total"] == pytest.approx(sum(held.values()) - held["total"])
        assert plan["fits"] == (max(held["total"] for held in plan["memory_bytes"]) <= plan["capacity_bytes"])
        assert plan["step_seconds"] == pytest.approx(sum(plan["seconds"].values()))


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


def test_json_has_one_schema(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plans.read_text())
    check_plans(found)
    assert found.keys() == {
        "version", "asked", "cluster", "num_devices", "capacity_bytes", "bound_seconds", "num_simulated", "is_complete", "plans", "missing",
        "advice",
    }  # fmt: skip
    for arguments, more in ((["explain"], ()), (["simulate"], ("simulation",))):
        main([*arguments, str(plans), "--json"])
        check_plans(json.loads(capsys.readouterr().out), frozenset(more))
    main(["compare", str(plans), f"{plans}:2", "--json"])
    both = json.loads(capsys.readouterr().out)
    check_plans(both)
    assert both["plans"] == found["plans"][:2]


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    assert torch.__version__ in text and "CPU cores" in text
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["torch"] == torch.__version__


def test_what_is_measured_is_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plans: Path
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    main(["calibrate", "--output", str(tmp_path / "mine.yaml"), "--json", str(tmp_path / "mine.json")])
    text = capsys.readouterr().out
    values = json.loads((tmp_path / "mine.json").read_text())
    assert Path(values["kept"]).parent == tmp_path and values["kept"] in text and values["cluster"]["device"]["memory_bandwidth"] > 0
    arguments = ["--model", str(plans.parent / "config.json"), "--seq-len", "8", "--global-batch", "2", "--tp", "1"]
    main(["plan", *arguments, "--cluster", f"{tmp_path / 'mine.yaml'}:1"])
    assert "1 device" in capsys.readouterr().out


PLAN_SMALL = ["plan", "--model", "{config}", "--seq-len", "8"]
MEMORY = ["estimate-memory", "--model", "{config}", "--seq-len", "8"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--model", "{config}", *ASKED], "Pass --seq-len (the model of"),
        (["plan", "--model", "nowhere.json", "--seq-len", "8", *ASKED], "No such file"),
        (["plan", "--model", "{folder}/vit.json", "--seq-len", "8", *ASKED], "is no causal language model"),
        (["plan", "--model", "{folder}/text.json", "--seq-len", "8", *ASKED], "is no JSON"),
        (["plan", "--model", "{folder}/list.json", "--seq-len", "8", *ASKED], "names its model_type"),
        (["plan", "--model", "no.such:thing", *ASKED], "No module named 'no'"),
        (["plan", "--model", f"{__name__}:nothing", *ASKED], "has no attribute 'nothing'"),
        (["plan", "--model", f"{__name__}:raises", *ASKED], "RuntimeError: no weights today, at "),
        (["plan", "--model", f"{__name__}:no_model", *ASKED], "gives a int: return a model"),
        ([*PLAN_SMALL, "--cluster", "h100", "--global-batch", "8"], "how many devices?"),
        ([*PLAN_SMALL, "--cluster", "h100:many", "--global-batch", "8"], "'many' is no number of devices"),
        ([*PLAN_SMALL, "--cluster", "h900:4", "--global-batch", "8"], "no numbers for 'h900'; known are a100"),
        ([*PLAN_SMALL, "--cluster", "{folder}/negative.yaml:4", "--global-batch", "8"], "device.memory_bandwidth must be more than 0"),
        ([*PLAN_SMALL, "--cluster", "8xh100:8", "--global-batch", "3", "--tp", "1"], "a batch of 3 samples does not divide over 2, 4, 8"),
        ([*PLAN_SMALL, *ASKED, "--memory", "2MB", "--offload", "none"], "such devices would do: "),
        (["plan", "--model", "{config}", "--seq-len", "-1", *ASKED], "a sample has one token or more"),
        ([*PLAN_SMALL, *ASKED, "--json", "/no/such/folder/x.json"], "there is no folder"),
        ([*MEMORY, "--batch", "8"], "Pass --mesh dp=2,tp=4, or --cluster h100:8"),
        (
            [*MEMORY, "--batch", "8", "--mesh", "dp=2,tp=4", "--cluster", "h100:4"],
            "has 8 ranks, the cluster 4 devices: they must be as many",
        ),
        ([*MEMORY, "--batch", "8", "--mesh", "dp=2,ep=4"], "the axes are pp, dp, tp, not ep"),
        ([*MEMORY, "--batch", "8", "--mesh", "dp2"], "'dp2' is no axis and its size; write dp=2,tp=4"),
        ([*MEMORY, "--batch", "8", "--mesh", "dp=2,dp=4"], "--mesh dp=2,dp=4: dp is there twice"),
        ([*MEMORY, "--batch", "7", "--mesh", "dp=2"], "does not divide over dp=2: take 6 or 8"),
        ([*MEMORY, "--batch", "8", "--mesh", "dp=2", "--num-microbatches", "3"], "take one of 1, 2, 4"),
        ([*MEMORY, "--batch", "8", "--mesh", "dp=2", "--num-microbatches", "0"], "num_microbatches=0 is no number of microbatches"),
        ([*MEMORY, "--batch", "8", "--cluster", "h100:4", "--num-microbatches", "-1"], "num_microbatches=-1 is no number of microbatches"),
        ([*MEMORY, "--batch", "8", "--mesh", "dp=2", "--optimizer", "best"], "optimizer='best' is unknown; use one of"),
        (["explain", "{config}"], "is no file that `autopar plan --json config.json` wrote"),
        (["explain", "{folder}/text.json"], "is no JSON, as autopar plan --json text.json writes it"),
        (["explain", "{folder}/later.json"], "is of version 7, and this autopar reads version 1"),
        (["simulate", "{folder}/later.json"], "is of version 7"),
        (["explain", "{plans}:99"], "has no plan 99: it has 3"),
        (["explain", "nowhere.json"], "No such file"),
        (["simulate", "{plans}", "--trace", "/no/such/folder/x.json"], "there is no folder"),
        (["calibrate", "--output", "/no/such/folder/x.yaml"], "there is no folder"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], text: str, config: Path, plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "vit.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    (config.parent / "list.json").write_text("[]")
    (config.parent / "text.json").write_text("layers: 3")
    (config.parent / "later.json").write_text(json.dumps({"version": 7, "plans": [{}]}))
    (config.parent / "negative.yaml").write_text(negative())
    with pytest.raises(SystemExit) as caught:
        main([each.format(config=config, folder=config.parent, plans=plans) for each in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error and len(error.splitlines()) <= 2, error


def negative() -> str:
    """A cluster's file with a negative bandwidth."""
    from autopar.cost.hardware.cluster import Cluster

    lines = Cluster.named("h100").to_yaml().splitlines()
    return "\n".join("  memory_bandwidth: -1 TB/s" if line.strip().startswith("memory_bandwidth") else line for line in lines)


def time_first() -> Any:
    return Recurrent(), (torch.zeros(9, 4, dtype=torch.int64),)


def batch_first() -> Any:
    return BatchFirst(), (torch.zeros(4, 9, dtype=torch.int64),)


@pytest.mark.parametrize("command", [["plan", "--global-batch", "8", "--tp", "1"], ["estimate-memory", "--batch", "8", "--mesh", "dp=2"]])
def test_samples_are_counted_by_the_dim_that_is_said(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def values(model: str, *more: str) -> dict[str, Any]:
        main([*command, "--model", f"{__name__}:{model}", "--cluster", "8xh100:2", *more, "--json"])
        return json.loads(capsys.readouterr().out)["plans"][0]

    first, last = values("batch_first"), values("time_first", "--batch-dims", "args[0]=1")
    same = ("mesh", "num_microbatches", "microbatch", "fits")
    assert {name: last[name] for name in same} == {name: first[name] for name in same}
    tokens = "tokens_per_second_per_device"
    assert last[tokens] * last["step_seconds"] == pytest.approx(first[tokens] * first["step_seconds"])
    held, wanted = last["memory_bytes"][0], first["memory_bytes"][0]
    assert held["parameters"] == wanted["parameters"] and held["activations"] == pytest.approx(wanted["activations"], rel=0.1)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ("x", "'x' is no input and its dim; write 1, the dim of all inputs, or src=1,labels=0,mask=none"),
        ("x=1,x=0", "x is there twice"),
        ("x=1", "batch_dims names 'x', which is no input of this call"),
    ],
)
def test_dims_that_there_are_not_are_refused(dims: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--model", f"{__name__}:time_first", *ASKED, "--batch-dims", dims])
    assert stopped.value.code == 2 and text in capsys.readouterr().err
