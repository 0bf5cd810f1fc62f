"""Constants fitted on published tables, and the errors on what was left out of a fit.

    python -m benchmarks.foresight_fit --device a100    rates of products and memory, on all tables and without each in turn
    python -m benchmarks.foresight_fit --device h100    all that `constants.py` marks H, on the runs without a pipeline, and without each
                                                        fifth of them and each model in turn; three hours

Nothing is changed: what a fit found is printed, to be copied into `autopar/foresight/constants.py`. Schedules that were searched for are
those that the present constants find.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median
from typing import Any

from autopar.foresight.constants import CALIBRATED, PROFILES, Constants, SoftwareProfile
from autopar.foresight.price import Prices
from autopar.foresight.step import Step
from benchmarks.foresight import PUBLISHED, TABLES, tables
from benchmarks.published_llamas import USUAL_MFU, is_plain
from benchmarks.published_rows import Case
from benchmarks.reporting import print_table

A100_TABLES = ("megatron_2021_table1", "korthikanti_2022_table5_iteration", "zero_bubble_table4")
H100_TABLE = "ultrascale_h100_all_runs"
# A100: shares of the present constants that are tried.
SHARES = {"product_flops": [0.94 + 0.01 * n for n in range(11)], "memory_bandwidth": [0.9 + 0.03333 * n for n in range(7)]}
# H100: what is fitted, of the device and of the profile, and what no data sheet allows more of.
DEVICE = ("product_flops", "attention_flops", "memory_bandwidth", "inner_bandwidth", "outer_latency", "outer_bandwidth")
SOFTWARE = ("host_seconds", "collective_host_seconds", "doubling_seconds")
MOST = {"product_flops": 700e12, "attention_flops": 400e12, "memory_bandwidth": 3.35e12, "inner_bandwidth": 450e9, "outer_bandwidth": 50e9}
# What a fit is after: the smallest median that leaves nine rows of ten within this.
WANTED_P90 = 0.245
FAR = 0.3


@dataclass(frozen=True)
class Fitted:
    """A row whose step is priced by any constants. All microbatches of a run without a pipeline are alike: two of them tell of all."""

    case: Case

    def error(self, constants: Constants, software: SoftwareProfile | None = None) -> float:
        step = self.case.step
        prices = Prices(step.prices.cluster, step.prices.mesh, constants, software or step.prices.profile, step.prices.tp_parts)
        number = step.plan.num_microbatches
        if step.plan.pp > 1 or number < 3:
            seconds = Step(step.work, step.plan, prices).prediction().step_seconds
        else:
            one, two = (Step(step.work, replace(step.plan, num_microbatches=n), prices).prediction().step_seconds for n in (1, 2))
            seconds = one + (number - 1) * (two - one)
        return seconds / self.case.printed - 1


def cases(name: str) -> Iterator[Case]:
    """Rows of a table, with the schedules that the present constants choose."""
    for case in TABLES[name](tables(PUBLISHED)):
        assert isinstance(case, Case)
        plan = replace(case.step.plan, schedule=case.step.schedule) if case.step.plan.schedule == "auto" else case.step.plan
        yield replace(case, step=Step(case.step.work, plan, case.step.prices))


def percentile(errors: Sequence[float], share: float) -> float:
    ordered = sorted(errors)
    return ordered[round(share * (len(ordered) - 1))]


def line(name: str, errors: Sequence[float], **more: Any) -> dict[str, Any]:
    sizes = {"median %": 100 * median(errors), "p90 %": 100 * percentile(errors, 0.9), "worst %": 100 * max(errors)}
    return {"asked of": name, "rows": len(errors), **sizes, **more}


def fit_a100() -> list[dict[str, Any]]:
    """The two rates by the mean of the tables' median errors, on a grid."""
    rows = {name: [Fitted(case) for case in cases(name)] for name in A100_TABLES}
    present = CALIBRATED["a100"]
    tried = [
        replace(present, product_flops=present.product_flops * products, memory_bandwidth=present.memory_bandwidth * memory)
        for products, memory in product(*SHARES.values())
    ]
    errors = [{name: [abs(row.error(each)) for row in rows[name]] for name in rows} for each in tried]
    lines: list[dict[str, Any]] = []
    for left_out in (None, *rows):
        kept = [name for name in rows if name != left_out]
        best = min(range(len(tried)), key=lambda at: mean(median(errors[at][name]) for name in kept))
        rates = {name: getattr(tried[best], name) for name in SHARES}
        asked = [left_out] if left_out else list(rows)
        lines += [{"fitted without": left_out or "–"} | line(name, errors[best][name], **rates) for name in asked]
    return lines


Point = dict[str, float]


def fit(rows: Sequence[Fitted], start: Point) -> Point:
    """Compass search: each constant up and down by a share, which is halved when nothing helps."""
    usual = [float(row.case.where["mfu_pct"]) >= USUAL_MFU for row in rows]

    def loss(point: Point) -> float:
        errors = errors_at(rows, point)
        beyond = max(0.0, percentile(errors, 0.9) - WANTED_P90)
        among = median(error for error, is_usual in zip(errors, usual, strict=True) if is_usual)
        return median(errors) + 0.3 * mean(min(error, FAR) for error in errors) + 0.3 * among + 3 * beyond

    best, least, share = start, loss(start), 0.1
    while share > 0.004:
        before = least
        for name, factor in product(best, (1 + share, 1 / (1 + share))):
            other = best | {name: min(best[name] * factor, MOST.get(name, float("inf")))}
            found = loss(other)
            best, least = (other, found) if found < least else (best, least)
        share = share if least < before else share / 2
    return best


def errors_at(rows: Sequence[Fitted], point: Point) -> list[float]:
    constants = replace(CALIBRATED["h100"], **{name: point[name] for name in DEVICE})
    software = replace(PROFILES["nanotron"], **{name: point[name] for name in SOFTWARE})
    return [abs(row.error(constants, software)) for row in rows]


def fit_h100() -> list[dict[str, Any]]:
    rows = [Fitted(case) for case in cases(H100_TABLE) if is_plain(case.where)]
    present = {name: getattr(CALIBRATED["h100"], name) for name in DEVICE} | {
        name: getattr(PROFILES["nanotron"], name) for name in SOFTWARE
    }
    whole = fit(rows, present)
    lines = [{"fitted without": "–"} | line("all", errors_at(rows, whole))]
    print_table("constants", [{"constant": name, "now": present[name], "fitted": whole[name]} for name in present])
    apart: list[float] = []
    for fifth in range(5):
        found = fit([row for at, row in enumerate(rows) if at % 5 != fifth], whole)
        apart += errors_at([row for at, row in enumerate(rows) if at % 5 == fifth], found)
    lines.append({"fitted without": "a fifth, in turn"} | line("that fifth", apart))
    for name in ("1B", "3B", "8B"):
        found = fit([row for row in rows if row.case.where["model"] != name], whole)
        lines.append({"fitted without": name} | line(name, errors_at([row for row in rows if row.case.where["model"] == name], found)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("a100", "h100"), required=True)
    options = parser.parse_args()
    print_table(f"fits of {options.device}", fit_a100() if options.device == "a100" else fit_h100())


if __name__ == "__main__":
    main()
