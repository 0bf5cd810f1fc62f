"""What the compiler decides and writes for twelve models, as text files: a change of its insides should leave every byte as it was.

    python -m benchmarks.golden FOLDER                    writes FOLDER/model/configuration/*.txt
    python -m benchmarks.golden FOLDER --against OTHER    then compares with an earlier folder; exits 1 where a file differs
    python -m benchmarks.golden FOLDER --models gpt2 t5   some of the models; only their files are written and compared

Tiny models of the zoo on virtual ranks; nothing is run. Where a model is refused, the refusal is what is written.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import multiprocessing
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import highspy
import torch

import autopar
from autopar import AutoparError, ParallelModule, virtual_mesh
from tests.support.models import language as zoo_language
from tests.support.models import vision as zoo_vision
from tests.support.models.zoo import Case

ZOO: dict[str, Callable[..., Case]] = {**zoo_language.ZOO, **zoo_vision.ZOO}
# By model how many layers it has if not as many as the zoo gives it: two where a block is to repeat.
MODELS: dict[str, int | None] = {
    "gpt2": 2, "llama": 2, "gemma3_text": None, "bloom": None, "mixtral": None, "qwen2_moe": None, "mamba": None, "bert": None,
    "deberta-v2": None, "t5": None, "vit": None, "resnet": None,
}  # fmt: skip
DROPOUT = {"gpt2": 0.1}  # draws, in one of them
PIPELINE: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "num_microbatches": 4}
# Kernels that are not the default's, and a GPU to choose them for: the ideal cluster has all ops of ours but no choice of kernels.
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"kernels": "triton", "cluster": "a100"},
    "llama": {"kernels": "triton", "cluster": "a100"},
    "bert": {"kernels": "off"},
}
OWN: dict[str, dict[str, Any]] = dict.fromkeys(
    ("mixtral", "resnet"), {"microbatch_statistics": "own"}
)  # they mix samples: 1f1b is refused, the others do this
SCHEDULES = (("interleaved", "zb-v"), ("zb-h1", "gpipe"))  # besides 1f1b; a model's place in the list says which
CLUSTER, SHARE = "a100", 0.7  # where memory is short, and how much there is of what the best plan without a budget holds
PLACE = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+(?=[\w.-]+\.py\b)")  # folders of files that errors name
MAX_NODES = 1  # of the search tree of an integer program
MEASURED = re.compile(r", found in [0-9.]+ s\b")  # the only time of a clock in `explain`


def texts_of(parallel: ParallelModule) -> dict[str, str]:
    """By file name what was decided and written. All that is read of the compiler's insides is read here."""
    compiled = parallel.compiled
    # The programs after the last pass of each form; forms follow one another.
    last = {step.program.form.value.lower(): step.name for step in compiled.steps}
    found = {f"{form}.txt": parallel.print_program(after=name) for form, name in last.items()}
    found |= {"plan.json": parallel.plan.to_json(), "explain.txt": MEASURED.sub("", parallel.explain(detail="all"))}
    schedules: list[str] = []
    for schedule in compiled.schedules:
        lines = ["inputs", *schedule.inputs, "", "outputs", *schedule.outputs, "", "instructions", str(schedule)]
        for name, fragment in sorted(schedule.fragments.items()):
            lines += ["", f"fragment {name}", *_module_lines(fragment.module)]
        schedules.append("\n".join(lines))
    found |= {f"schedule_{number}.txt": text for number, text in enumerate(dict.fromkeys(schedules))}
    if not compiled.order.is_single:
        found["order.txt"] = str(compiled.order)
    return found


def held_bytes(parallel: ParallelModule) -> float:
    """What a rank holds by the search's own count, which a budget limits."""
    search = parallel.summary()["search"]
    assert search is not None
    return search["held_bytes"]


def _module_lines(module: torch.nn.Module) -> Iterator[str]:
    """The code of a graph and of those inside it, and a digest of every constant."""
    for name, each in module.named_modules():
        if isinstance(each, torch.fx.GraphModule):
            yield f"{name or 'code'}:{each.code}"
    for name, value in sorted(module.state_dict(keep_vars=True).items()):
        whole = value.detach().contiguous()
        digest = hashlib.sha256(whole.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() if whole.dim() else repr(whole.item())
        yield f"constant {name} {str(whole.dtype).removeprefix('torch.')}{list(whole.shape)} {digest}"


def configurations(name: str) -> dict[str, dict[str, Any]]:
    """By folder the mesh and the options of a compile."""
    found: dict[str, dict[str, Any]] = {"dp2-tp2": {"mesh": {"dp": 2, "tp": 2}}, "tp4": {"mesh": {"tp": 4}}}
    found["pp2-dp2-tp2-1f1b"] = PIPELINE | {"schedule": "1f1b"}
    for schedule in SCHEDULES[list(MODELS).index(name) % len(SCHEDULES)]:
        found[f"pp2-dp2-tp2-{schedule}"] = PIPELINE | {"schedule": schedule} | OWN.get(name, {})
    if more := MORE.get(name):
        found[f"pp2-dp2-tp2-{more['kernels']}"] = PIPELINE | more
    found["dp2-tp2-budget"] = found["dp2-tp2"] | {"cluster": CLUSTER, "share": SHARE}
    return found


def compiled_case(name: str, mesh: dict[str, int], **options: Any) -> ParallelModule:
    """The model, built anew, compiled for virtual ranks."""
    torch.manual_seed(0)
    sizes = {"num_layers": MODELS[name], "dropout": DROPOUT.get(name)}
    case = ZOO[name](**{key: value for key, value in sizes.items() if value is not None})
    return autopar.compile(case.model, virtual_mesh(**mesh), example_inputs=dict(case.batch), backend="eager", **options)


def texts_or_refusal(name: str, share: float | None = None, **options: Any) -> dict[str, str]:
    """What was written, or the error that was raised; with `share` in so much of the memory that the best plan without a budget takes.

    A crash is told from a refusal, and is as good to compare.
    """
    found: dict[str, str] = {}
    try:
        if share is not None:
            options["memory_budget"] = int(share * held_bytes(compiled_case(name, **options)))
            found["budget.txt"] = f"{options['memory_budget']} bytes"
        return found | texts_of(compiled_case(name, **options))
    except Exception as error:
        kind = "refused" if isinstance(error, AutoparError) else "crashed"
        return found | {"error.txt": PLACE.sub("", f"{kind}: {type(error).__name__}: {error}")}


def without_clock() -> None:
    """Let the integer programs of this process end after so many nodes: after so many seconds each run would end elsewhere."""
    original = highspy.Highs.setOptionValue

    def set_option(solver: highspy.Highs, option: str, value: Any) -> Any:
        return original(solver, "mip_max_nodes", MAX_NODES) if option == "time_limit" else original(solver, option, value)

    highspy.Highs.setOptionValue = set_option  # pyright: ignore[reportAttributeAccessIssue]


def write_model(name: str, folder: Path) -> tuple[str, float]:
    """Write the folder of one model anew; a line about it, and the seconds it took."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    without_clock()
    found = {place: texts_or_refusal(name, **options) for place, options in configurations(name).items()}
    shutil.rmtree(folder / name, ignore_errors=True)
    for place, texts in found.items():
        (folder / name / place).mkdir(parents=True)
        for file, text in texts.items():
            (folder / name / place / file).write_text(f"{text.rstrip()}\n", encoding="utf-8")
    errors = [f"{place}: {texts['error.txt'].splitlines()[0][:120]}" for place, texts in found.items() if "error.txt" in texts]
    line = f"{sum(map(len, found.values()))} files" + "".join(f"\n    {error}" for error in errors)
    return line, time.perf_counter() - start


def write_all(names: Sequence[str], folder: Path, num_jobs: int) -> None:
    """Each model in a process of its own, so that none finds what another left in a cache."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(write_model, name, folder): name for name in names}
        for done in as_completed(running):
            line, seconds = done.result()
            print(f"{running[done]:12} {seconds:6.1f} s  {line}", flush=True)


def differences(folder: Path, other: Path, names: Sequence[str], num_lines: int = 12) -> Iterator[str]:
    """One text for each file of these models that differs between the folders or is in one alone."""
    roots, texts = (other, folder), list[dict[str, bytes]]()
    for root in roots:
        paths = sorted(path for name in names for path in (root / name).rglob("*") if path.is_file())
        texts.append({str(path.relative_to(root)): path.read_bytes() for path in paths})
    for file in sorted(texts[0].keys() | texts[1].keys()):
        if file not in texts[0] or file not in texts[1]:
            yield f"{file}: only in {roots[file in texts[1]]}"
        elif texts[0][file] != texts[1][file]:
            before, after = (each[file].decode().splitlines() for each in texts)
            lines = list(difflib.unified_diff(before, after, str(other / file), str(folder / file), n=0, lineterm=""))
            rest = [f"… {len(lines) - num_lines} more lines"] if len(lines) > num_lines else []
            yield "\n    ".join([f"{file}: differs", *(line[:200] for line in lines[:num_lines]), *rest])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is written to; what it has of these models is replaced")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="an earlier folder to compare with")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    options = parser.parse_args()
    if options.against is not None and (not options.against.is_dir() or options.against.resolve() == options.folder.resolve()):
        parser.error(f"--against {options.against}: name a folder that is there and is not the one to write")
    start = time.perf_counter()
    write_all(options.models, options.folder, options.jobs)
    print(f"{len(options.models)} models in {time.perf_counter() - start:.0f} s")
    if options.against is None:
        return 0
    found = list(differences(options.folder, options.against, options.models))
    print("\n".join(found) or f"nothing differs from {options.against}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
