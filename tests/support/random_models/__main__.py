"""Random models by `autopar.compile` beside plain torch: `python -m tests.support.random_models --seeds 1000:2000`, or a single seed.

Prints what is wrong, with the source and the command that runs just that again; `--shrink` makes it smaller first. Fails where anything is.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.support.random_models.cases import Case, random_case
from tests.support.random_models.oracle import Outcome, Tally, outcome_of
from tests.support.random_models.shrink import shrink, smaller_cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.random_models", description="Random models beside plain torch.")
    parser.add_argument("seed", type=int, nargs="?", help="a single one, which is printed whatever comes of it")
    parser.add_argument("--seeds", type=_seeds, default=range(0), metavar="FROM:TO")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--shrink", action="store_true", help="make what is wrong smaller first; minutes each")
    parser.add_argument("--verbose", action="store_true", help="print what is refused or skipped, too")
    chosen = parser.parse_args()
    logging.getLogger("autopar").setLevel(logging.ERROR)
    is_single = chosen.seed is not None
    shown = {"wrong", *["refused", "skipped"] * (chosen.verbose or is_single), *["exact"] * is_single}
    tally, start = Tally(), time.monotonic()
    for seed in chosen.seeds if chosen.seed is None else (chosen.seed,):
        case = random_case(seed, chosen.backend)
        outcome = outcome_of(case)
        tally.add(case, outcome)
        if outcome.kind in shown:
            _show(*(_smallest(case, outcome) if chosen.shrink and outcome.kind == "wrong" else (case, outcome)))
    print(f"{tally}; {time.monotonic() - start:.0f} s")
    print(", ".join(f"{name} {count}" for name, count in tally.families.most_common()))
    return tally.kinds["wrong"] > 0


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def _smallest(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """With what is wrong of it now."""
    last = outcome

    def fails(smaller: Case) -> bool:
        nonlocal last
        found = outcome_of(smaller)
        last = found if found.kind == "wrong" else last
        return found.kind == "wrong"

    return shrink(case, smaller_cases, fails), last


def _show(case: Case, outcome: Outcome) -> None:
    print(f"{case}\n{outcome.kind}: {outcome.detail}\nagain: {case.command}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
