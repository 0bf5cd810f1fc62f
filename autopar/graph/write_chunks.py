"""Writes a collective and the products beside it piece by piece.

    all_gather x → w                     all_gather x.0 → w.0, all_gather x.1 → w.1
    h = mm(w, a)              →          h.0 = mm(w.0, a)      while w.1 is on its way
                                         h.1 = mm(w.1, a)
                                         h = cat(h.0, h.1)

    h = mm(x, a)                         h.0 = mm(x.0, a), reduce_scatter h.0 → y.0
    reduce_scatter h → y      →          h.1 = mm(x.1, a)      while y.0 is on its way
                                         reduce_scatter h.1 → y.1
                                         y = cat(y.0, y.1)

Each piece bears its number, at which fragments are cut; pieces of one site are alike, and so are those of equal layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar.graph.chunk_sites import Pieces, Site, cut_operands, first_reader, hoisted
from autopar.graph.emit import Emitter, lay_out_anew, tensor_of
from autopar.graph.pieces import contiguous, cut, joined, piece_of, shape_at
from autopar.ir.collectives import wait
from autopar.ir.keys import CHUNK, DIMS, ORIGIN, SHARDING


def write(graph: Graph, site: Site, pieces: Pieces) -> None:
    """Put the pieces of `site` in place of it, in `graph`."""
    writer = _Writer(graph, site, pieces)
    writer.gather() if site.is_gather else writer.reduce()
    for node in reversed(site.calls):
        if not node.users:
            graph.erase_node(node)


@dataclass
class _Writer:
    graph: Graph
    site: Site
    pieces: Pieces
    made: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])

    @property
    def number(self) -> int:
        return self.pieces.of_calls[self.site.launch].number

    def gather(self) -> None:
        launch, completed = self.site.launch, self.site.wait
        self.cut(before=launch)
        for number in range(self.number):
            self.launch(number, launch)
        first = first_reader(launch, set(self.site.calls))
        for product in self.site.products:
            for node in hoisted(product, launch, first) or ():
                first.prepend(node)
        for number in range(self.number):
            for node in self.site.calls:
                if node is not launch and node is not completed:
                    self.piece(node, number, before=first)
        for node in self.site.calls:
            if node is not launch and any(user not in self.site.calls for user in node.users):
                self.whole(node, before=first)

    def reduce(self) -> None:
        launch, completed = self.site.launch, self.site.wait
        self.cut(before=launch)
        for number in range(self.number):
            for node in self.site.calls:
                if node is not launch:
                    self.piece(node, number, before=launch)
            self.launch(number, launch)
        self.whole(completed, before=min(completed.users))
        self.graph.erase_node(completed)

    def cut(self, before: Node) -> None:
        """What the site reads, in pieces."""
        for operand, digit in self.pieces.of_operands.items():
            self.made[operand] = cut(Emitter(self.graph, before, self.site.launch), operand, digit)

    def launch(self, number: int, before: Node) -> None:
        """One piece of the collective, and its wait."""
        launch, completed = self.site.launch, self.site.wait
        operand = contiguous(Emitter(self.graph, before, launch), self.made[launch.all_input_nodes[0]][number])
        self.add(launch, Emitter(self.graph, before, launch).call(launch.target, operand, *launch.args[1:]), number)
        self.add(completed, Emitter(self.graph, before, completed).call(wait, self.made[launch][number]), number)

    def piece(self, node: Node, number: int, before: Node) -> None:
        operands = [self.made[operand][number] for operand in cut_operands(node)]
        self.add(node, piece_of(Emitter(self.graph, before, node), node, operands, self.pieces.of_calls[node]), number)

    def add(self, node: Node, piece: Node, number: int) -> None:
        self.made.setdefault(node, []).append(piece)
        CHUNK[piece] = number
        if node in ORIGIN:
            ORIGIN[piece] = ORIGIN[node]

    def whole(self, node: Node, before: Node) -> None:
        """`node` put together again, for those who read all of it."""
        emit = Emitter(self.graph, before, node)
        whole = joined(emit, self.made[node], self.pieces.of_calls[node], shape_at(node))
        if node in ORIGIN:
            ORIGIN[whole], DIMS[whole], SHARDING[whole] = ORIGIN[node], DIMS[node], SHARDING[node]
        node.replace_all_uses_with(whole, lambda user: user not in self.site.calls)
        if tensor_of(whole).stride() != tensor_of(node).stride():
            lay_out_anew(whole)
