"""Cuts collectives and the products beside them by rows into pieces, of which one moves while another is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from autopar.cost.chunk_prices import seconds_in_pieces, seconds_whole
from autopar.cost.hardware.cluster import Cluster
from autopar.cost.memory import MemoryBudget
from autopar.cost.model import CostModel
from autopar.graph.chunk_sites import Site, axes_of, sites
from autopar.graph.write_chunks import write
from autopar.ir.collectives import is_launch
from autopar.ir.keys import PHASE
from autopar.ir.mesh import MICROBATCHES
from autopar.ir.program import Form, Program, results_of
from autopar.ir.units import in_seconds
from autopar.plans.decisions import Chunks
from autopar.plans.keys import node_keys

# What is tried, and what so many pieces have to save of a chain beside fewer: less than that is less than what prices know.
NUMBERS = (2, 4, 8)
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class ChunkCollectives:
    """Cut all-gathers and the products behind them, and products and the sums over ranks behind them, into pieces of rows.

    How many pieces is found by cost ("auto"; under a memory budget none: pieces and what they are put together to are there at once),
    or asked for (`asked`; "off": none), or `planned`. Each result is put together again, so that all else reads what it read. Source of the
    idea: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", 2023.

    Reads: a LOCAL program whose calls have their stages. Writes: pieces in place of collectives and products, CHUNK on them.
    Ensures: each row is computed by the same product of the same operands; what else a rank computes is as before.
    """

    cluster: Cluster
    asked: str | int = "auto"
    planned: Mapping[str, int] | None = None
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    name: str = "chunk collectives"

    def decide(self, program: Program) -> Chunks:
        if self.asked == "off":
            return Chunks(reason='whole: collective_chunks="off"')
        cost = CostModel(self.cluster, program.mesh)
        if self.asked == "auto" and self.planned is None:
            groups = {axes_of(node) for node in program.graph.nodes if is_launch(node)}
            if all(cost.collective("all_gather", axes, 0, 0).seconds <= 0 for axes in groups if MICROBATCHES not in axes):
                return Chunks(reason="whole: links cost nothing here")
            if self.budget.is_finite:
                return Chunks(reason="whole: pieces would take memory, of which there is a budget")
        return self._priced(program, cost)

    def apply(self, program: Program, decision: Chunks) -> Program:
        assert program.form is Form.LOCAL
        if not decision.numbers:
            return program
        program = program.copy()
        keys = node_keys(program)
        for site in sites(program):
            pieces = site.pieces(decision.numbers.get(keys[site.launch], 1))
            if keys[site.launch] in decision.numbers and pieces is not None:
                write(program.graph, site, pieces)
        program.graph.lint()
        return program

    def written(self, program: Program, decision: Chunks) -> dict[str, int]:
        return dict(decision.numbers)

    def read(self, program: Program, value: Mapping[str, int]) -> Chunks:
        return Chunks(dict(value))

    def _priced(self, program: Program, cost: CostModel) -> Chunks:
        keys, numbers, reasons = node_keys(program), dict[str, int](), dict[str, str]()
        known: dict[object, tuple[int, str]] = {}
        for site in sites(program):
            key, alike = keys[site.launch], _description(site)
            if isinstance(self.asked, int):
                found = _as_asked(site, self.asked)
            elif self.planned is not None:
                found = self.planned.get(key, 1), "as planned"
            else:
                found = known[alike] if alike in known else _best(site, cost)
                known[alike] = found
            reasons[key] = found[1]
            if found[0] > 1:
                numbers[key] = found[0]
        return Chunks(numbers, reasons)


def _as_asked(site: Site, number: int) -> tuple[int, str]:
    if site.pieces(number) is None:
        return 1, f"whole: no dim of its rows can be cut into {number} equal parts"
    return number, f"{number} pieces, as asked"


def _best(site: Site, cost: CostModel) -> tuple[int, str]:
    """In how many pieces the chain takes least, and why."""
    whole = seconds_whole(site, cost)
    tried = {number: seconds_in_pieces(site, number, cost) for number in NUMBERS}
    seconds = {1: whole} | {number: each for number, each in tried.items() if each is not None}
    best = 1
    for number in seconds:
        best = number if seconds[number] < seconds[best] - LEAST_GAIN * whole else best
    others = ", ".join(f"in {number} {in_seconds(each)}" for number, each in seconds.items() if number not in (1, best))
    if best == 1:
        return 1, f"whole: {in_seconds(whole)} with its products" + (f"; {others}" if others else ", and its rows cannot be cut")
    return best, f"{best} pieces: {in_seconds(whole)} → {in_seconds(seconds[best])} with its products" + (f"; {others}" if others else "")


def _description(site: Site) -> object:
    """Equal for sites that take equally long, whatever their number of pieces."""
    numbers: dict[Node, int] = {}
    lines: list[object] = []
    for node in sorted({*site.calls, site.wait}):
        for each in (*node.all_input_nodes, node):
            if each not in numbers:
                numbers[each] = len(numbers)
                lines += [(tuple(value.shape), value.stride(), value.dtype) for value in results_of(each) if value is not None]
        outside = any(user not in site.calls and user is not site.wait for user in node.users)
        lines.append((node.target, tuple(numbers[each] for each in node.all_input_nodes), outside, PHASE.get(node)))
    return site.axes, tuple(lines)
