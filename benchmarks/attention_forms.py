"""How many ways to write attention become one op: by our pass, and by Inductor's own attention patterns, on the same small modules.

    python -m benchmarks.attention_forms                                             every form, in training and in inference
    python -m benchmarks.attention_forms --docs benchmarks/results/attention_forms.md

The forms and the near misses are those of the tests (tests/support/forms/attention.py). Inductor counts its matches; it is run as far as
its patterns and no further. Both are asked in float32 and in float16, the dtypes of Inductor's patterns: a form counts as ours where it
is fused in both, and as Inductor's where either matches. Near misses are asked in float32: in float16 rounding to it is no miss. What
Inductor matches is also compiled to its end, in float32, and compared with the module itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.frontend.capture import capture
from autopar.ir.mesh import virtual_mesh
from autopar.passes.forward.fuse_attention import FuseAttention
from benchmarks.reporting import machine, print_table, write_json
from tests.support.forms import (
    attention,
    attention_caps_and_sinks,
    attention_documents,
    attention_layouts,
    attention_masks,
    attention_near_misses,
)
from tests.support.forms.attention import ATTENTIONS
from tests.support.forms.inductor_attention import fault_of_inductor, inductor_matches
from tests.support.forms.suite import Form

NEAR = "near misses"
# By the file that a form is written in; a near miss may be in any.
GROUPS = {
    attention.__name__: "scales and softmax",
    attention_layouts.__name__: "layouts, grouped heads",
    attention_masks.__name__: "masks and biases",
    attention_documents.__name__: "packed documents",
    attention_caps_and_sinks.__name__: "soft caps, sinks, windows",
    attention_near_misses.__name__: NEAR,
}
DTYPES = (torch.float32, torch.float16)
# What every pattern matcher knows: where Inductor's does not match it, this script is at fault.
PLAIN = "divided"
MODES = {"training": True, "inference": False}
Question = Callable[[Form, torch.dtype, bool], bool]


@dataclass(frozen=True)
class Outcome:
    """What became of one form, in training and in inference.

    `faults` are of those that Inductor matches, by mode: what torch.compile raises in the end, or how far its result is off.
    """

    name: str
    group: str
    ours: dict[str, bool]
    inductor: dict[str, bool]
    faults: dict[str, str]


def outcome(form: Form) -> Outcome:
    group, dtypes = (NEAR, DTYPES[:1]) if form.name in ATTENTIONS.near_misses else (GROUPS[form.compute.__module__], DTYPES)
    ours, inductor = asked(fuses, form, dtypes, all), asked(matches, form, dtypes, any)
    inputs = inputs_of(form, torch.float32)
    faults = {mode: fault_of_inductor(form.module().float(), inputs, MODES[mode]) for mode in MODES if inductor[mode]}
    return Outcome(form.name, group, ours, inductor, faults)


def asked(question: Question, form: Form, dtypes: Sequence[torch.dtype], combine: Callable[[Iterable[bool]], bool]) -> dict[str, bool]:
    return {mode: combine([question(form, dtype, training) for dtype in dtypes]) for mode, training in MODES.items()}


def fuses(form: Form, dtype: torch.dtype, training: bool) -> bool:
    """Whether our pass makes the form one op."""
    module = form.module().to(dtype).train(training).requires_grad_(training)
    program = capture(module, inputs_of(form, dtype), {}, virtual_mesh(dp=1), outputs="all")
    return bool(FuseAttention().decide(program).fused)


def matches(form: Form, dtype: torch.dtype, training: bool) -> bool:
    """Whether one of Inductor's patterns matches the form; not, where torch.compile cannot take it at all."""
    return bool(inductor_matches(form.module().to(dtype), inputs_of(form, dtype), training))


def inputs_of(form: Form, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in form.inputs())


def totals(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One line a group, one of all forms, one of the near misses."""
    forms = [each for each in found if each.group != NEAR]
    near = [each for each in found if each.group == NEAR]
    lines = [_total(group, [each for each in forms if each.group == group]) for group in GROUPS.values() if group != NEAR]
    return [*lines, _total("all forms", forms), _total(NEAR, near)]


def _total(name: str, found: Sequence[Outcome]) -> dict[str, Any]:
    counts = {f"{who}, {mode}": sum(getattr(each, who)[mode] for each in found) for who in ("ours", "inductor") for mode in MODES}
    return {"group": name, "forms": len(found), **counts}


def document(found: Sequence[Outcome]) -> str:
    """The outcomes as a Markdown page: totals, then the names."""
    lines, where = totals(found), machine()
    return "\n".join(
        [
            "# Ways to write attention",
            "",
            f"`python -m benchmarks.attention_forms`, {where['date']}, torch {where['torch']}, on the CPU. How many of the forms in",
            "`tests/support/forms/attention*.py` become one op by `passes/forward/fuse_attention.py`, and how many Inductor's own patterns",
            "match, each asked in float32 and in float16: ours counts where it fuses in both, Inductor's where it matches in either.",
            "Near misses are to be left alone (float32). What Inductor matches was compiled to its end and compared with the module, in",
            "float32.",
            "",
            *_markdown([list(lines[0]), *([str(value) for value in line.values()] for line in lines)]),
            "",
            "By name. Inductor matches those in the third column: † in inference only, ‡ in training only.",
            "",
            *_markdown(_by_name(found)),
            "",
            *_exceptions(found),
        ]
    )


def _by_name(found: Sequence[Outcome]) -> list[list[str]]:
    rows = [["group", "ours alone", "Inductor too"]]
    for group in dict.fromkeys(each.group for each in found if each.group != NEAR):
        own = [each for each in found if each.group == group]
        both = [each for each in own if any(each.inductor.values())]
        rows.append([group, _names(each for each in own if each not in both), _names(both)])
    return rows


def _exceptions(found: Sequence[Outcome]) -> list[str]:
    """What is not as it should be, of either."""
    missed = _names(each for each in found if each.group != NEAR and not all(each.ours.values()))
    taken = {who: _names(each for each in found if each.group == NEAR and any(getattr(each, who).values())) for who in ("ours", "inductor")}
    lines = [
        f"- Forms that ours leaves alone: {missed or 'none'}.",
        f"- Near misses that ours takes: {taken['ours'] or 'none'}; that Inductor takes: {taken['inductor'] or 'none'}.",
    ]
    for mode in MODES:
        faults = [f"{each.name} ({each.faults[mode]})" for each in found if each.faults.get(mode)]
        lines.append(
            f"- Matched by Inductor in {mode}, whereupon torch.compile raises or computes something else: {'; '.join(faults) or 'none'}."
        )
    return [*lines, ""]


def _names(found: Iterable[Outcome]) -> str:
    return "; ".join(each.name + _mark(each.inductor) for each in found)


def _mark(inductor: dict[str, bool]) -> str:
    if all(inductor.values()) or not any(inductor.values()):
        return ""
    return " ‡" if inductor["training"] else " †"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *rest = rows
    return ["| " + " | ".join(row) + " |" for row in [first, ["---"] * len(first), *rest]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", metavar="name", help="only these, by name")
    parser.add_argument("--docs", type=Path, help="write the tables to this file")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    options = parser.parse_args()
    every = ATTENTIONS.forms | ATTENTIONS.near_misses
    if unknown := [name for name in options.forms or () if name not in every]:
        parser.error(f"no form {unknown[0]!r}; there are {', '.join(every)}")
    if not matches(ATTENTIONS.forms[PLAIN], torch.float32, MODES["training"]):
        parser.exit(1, f"Inductor's patterns do not match {PLAIN!r}: its matches are not counted as this script thinks\n")
    found: list[Outcome] = []
    for form in [every[name] for name in options.forms or every]:
        found.append(outcome(form))
        print(found[-1], flush=True)
    print_table("ways to write attention that become one op", totals(found))
    write_json(options.json, {"forms": [asdict(each) for each in found]})
    if options.docs:
        options.docs.write_text(document(found))


if __name__ == "__main__":
    main()
