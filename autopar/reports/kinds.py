"""Where the parameters lie, one line for each kind: those of repeated layers that lie alike, and their like beside them, are one.

model.layers.*.self_attn.{q,k,v}_proj.weight   [128@tp, 128]   columns over tp   × 12   else +3.3 %
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from torch.fx import Node

from autopar.driver.compiled import Compiled
from autopar.ir.keys import DIMS, SHARDING
from autopar.ir.mesh import parent
from autopar.ir.pattern import folded, pattern_of
from autopar.ir.program import Input, Program
from autopar.ir.sharding import Sharding
from autopar.ir.units import in_seconds
from autopar.reports.explain import GATHERED, pinned_by, split_words

# Parameters that all together have a smaller share of the elements are not named.
_SMALL = 0.01
# Less than this share of a step is no difference.
_EQUAL = 5e-4
# There is another way that a step takes no longer with.
AS_GOOD = "another way is as good"
_SHORT = {
    "column": "columns",
    "row: partial sums": "rows",
    "columns of the table": "columns of the table",
    "rows of the table: partial sums": "rows of the table",
}


@dataclass(frozen=True)
class Kind:
    """Parameters that lie alike. `name` stands for all `names`; `others` says what the next-best way would add, or why there is none."""

    name: str
    names: tuple[str, ...]
    where: str
    how: str
    num_elements: int
    others: str = ""


def kinds(compiled: Compiled, is_ideal: bool) -> list[Kind]:
    """In the order of the program. `is_ideal`: next-best ways are said as shares of the step's work, not in seconds."""
    program = compiled.program
    rows: dict[tuple[str, str, str], list[tuple[Input, Node]]] = {}
    all_names = [item.name for item, _ in program.named_inputs() if item.kind == "parameter"]
    for item, node in program.named_inputs():
        if item.kind == "parameter":
            key = (pattern_of(item.name), _where(node), _how(item, node, program))
            rows.setdefault(key, []).append((item, node))
    found: list[Kind] = []
    for (_, where, how), members in rows.items():
        names = tuple(item.name for item, _ in members)
        others = _others(compiled, [node for _, node in members], names, is_ideal)
        found.append(Kind(folded(names, all_names), names, where, how, sum(_num_elements(item) for item, _ in members), others))
    return _joined(found)


def _where(node: Node) -> str:
    """`[512, 128@tp]`: the dims, and the axes over which each lies in parts, whichever part of the dim they split."""
    splits, written = iter(SHARDING[node][0].splits), list[str]()
    for dim in DIMS[node][0]:
        axes = [parent(axis) for _ in dim for axis in next(splits)]
        written.append(f"{math.prod(dim)}" + (f"@{'·'.join(dict.fromkeys(axes))}" if axes else ""))
    return f"[{', '.join(written)}]"


def _num_elements(item: Input) -> int:
    return math.prod(item.shape)


def _how(item: Input, node: Node, program: Program) -> str:
    words = split_words(node)
    if not words:
        who = "every rank" if len(set(program.order.stages)) < 2 else "every rank of its stage"
        return f"whole on {who}{'' if item.requires_grad else ', frozen'}"
    within = _within(SHARDING[node][0], node)
    return ", ".join(_way(dim, axes, word, program) + within[dim] for dim, axes, word in words)


def _way(dim: int, axes: str, word: str, program: Program) -> str:
    if word == GATHERED or any(program.freedom.is_batch(axis) for axis in axes.split("·")):
        return f"in parts over {axes}"
    return f"{_SHORT.get(word, f'dim {dim}')} over {axes}"


def _others(compiled: Compiled, nodes: Sequence[Node], names: Sequence[str], is_ideal: bool) -> str:
    """`else +1.2 ms`: what a step takes more when all of them lie the next-best way."""
    search = compiled.search
    reasons = {pinned_by(compiled, name, node) for name, node in zip(names, nodes, strict=True)}
    if len(reasons) == 1 and (reason := reasons.pop()):
        return reason
    if search is None:
        return ""
    found = [search.runner_up(node.name) for node in nodes]
    known = [each.extra_seconds / each.num_nodes for each in found if each is not None]
    if not known:
        return "no other way but by zero=" if _could_be_in_parts(compiled.program) else "no other way"
    added, step = sum(known), search.cost_seconds
    if step <= 0 or added / step < _EQUAL:
        return AS_GOOD
    price = f"+{100 * added / step:.2g} %" if is_ideal else in_seconds(added * search.num_microbatches, sign=True)
    ways = {_dims(each.strategy.results[0], node) for each, node in zip(found, nodes, strict=True) if each is not None}
    return f"else {ways.pop() if len(ways) == 1 else 'otherwise'} {price}"


def _could_be_in_parts(program: Program) -> bool:
    mesh = program.mesh
    return not program.freedom.shards_parameters and program.freedom.zero is None and mesh.num_shares > 1


def _dims(sharding: Sharding, node: Node) -> str:
    """`dim 0 over tp`."""
    splits, found, within = iter(sharding.splits), list[str](), _within(sharding, node)
    for index, dim in enumerate(DIMS[node][0]):
        axes = dict.fromkeys(parent(axis) for _ in dim for axis in next(splits))
        found += [f"dim {index} over {'·'.join(axes)}{within[index]}"] if axes else []
    return ", ".join(found) or "whole"


def _within(sharding: Sharding, node: Node) -> list[str]:
    """Of each dim of `node`, where not the whole of it is cut into as many pieces as there are ranks, but each piece of a size is: the
    queries, keys and values that lie in one matrix, ` within each 768`."""
    splits, found = iter(sharding.splits), list[str]()
    for dim in DIMS[node][0]:
        first = next((index for index, split in enumerate([next(splits) for _ in dim]) if split), 0)
        found.append(f" within each {math.prod(dim[first:])}" if math.prod(dim[:first]) > 1 else "")
    return found


def _joined(found: list[Kind]) -> list[Kind]:
    """Kinds of one module that lie alike and are as many: `{q,k,v}_proj` for three."""
    groups: dict[tuple[str, str, str, int], list[Kind]] = {}
    for each in found:
        parts = each.name.split(".")
        owner, rest = (".".join(parts[:-2]), parts[-1]) if len(parts) > 1 else ("", "")
        groups.setdefault((owner, rest, f"{each.where} {each.how}", len(each.names)), []).append(each)
    joined: list[Kind] = []
    for group in groups.values():
        if len(group) == 1 or len(group[0].name.split(".")) < 3:
            joined += group
            continue
        parts = group[0].name.split(".")
        name = ".".join((*parts[:-2], _either([each.name.split(".")[-2] for each in group]), parts[-1]))
        prices = {each.others for each in group}
        others = group[0].others if len(prices) == 1 else " / ".join(dict.fromkeys(each.others.removeprefix("else ") for each in group))
        others = others if len(prices) == 1 or not group[0].others.startswith("else ") else f"else {others}"
        names = tuple(name for each in group for name in each.names)
        joined.append(replace(group[0], name=name, names=names, num_elements=sum(each.num_elements for each in group), others=others))
    order = {each.names[0]: number for number, each in enumerate(found)}
    return sorted(joined, key=lambda each: order[each.names[0]])


def _either(words: Sequence[str]) -> str:
    """`{q,k,v}_proj`."""
    end = commonprefix([word[::-1] for word in words])[::-1]
    end = end if end.startswith("_") else ""
    return "{" + ",".join(word.removesuffix(end) for word in words) + "}" + end


def kind_lines(found: Sequence[Kind], most: int, prices: bool = True) -> Iterator[str]:
    """At most `most` lines: the largest kinds in the order of the program, then how much the others are. `prices`: of next-best ways."""
    total = sum(each.num_elements for each in found) or 1
    largest = sorted(found, key=lambda each: -each.num_elements)
    large = [each for each in largest if each.num_elements >= _SMALL * total] or largest
    shown = large if len(found) <= most and len(large) == len(found) else large[: most - 1]
    lines = [each for each in found if each in shown]
    columns: list[Callable[[Kind], str]] = [lambda each: each.name, lambda each: each.where, lambda each: each.how, _count]
    widths = [max((len(column(each)) for each in lines), default=0) for column in columns]
    for each in lines:
        yield "   ".join(
            (*(f"{column(each):<{width}}" for column, width in zip(columns, widths, strict=True)), each.others if prices else "")
        ).rstrip()
    rest = [each for each in found if each not in shown]
    if rest:
        share = sum(each.num_elements for each in rest) / total
        yield f"{sum(len(each.names) for each in rest)} others, {_percent(share)} of the elements: {_ways(rest)}"


def _count(kind: Kind) -> str:
    return f"× {len(kind.names)}" if len(kind.names) > 1 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 else "less than 0.1 %"


def _ways(rest: Iterable[Kind]) -> str:
    """`41 whole on every rank, 8 columns over tp`."""
    numbers: dict[str, int] = {}
    for each in rest:
        numbers[each.how] = numbers.get(each.how, 0) + len(each.names)
    ways = sorted(numbers.items(), key=lambda way: -way[1])
    shown = ", ".join(f"{number} {how}" for how, number in ways[:3])
    return shown + (", …" if len(ways) > 3 else "")
