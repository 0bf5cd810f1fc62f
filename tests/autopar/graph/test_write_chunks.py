"""Pieces stand in place of a site: so many collectives, each product's rows in order, nothing left of what was whole."""

from __future__ import annotations

import pytest

from autopar.checks.checker import check
from autopar.graph.chunk_sites import sites
from autopar.graph.write_chunks import write
from autopar.ir.collectives import all_gather
from autopar.ir.keys import CHUNK, ORIGIN
from tests.autopar.graph.test_chunk_sites import local_program


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_site_is_written_in_pieces_and_the_program_holds(number: int) -> None:
    program = local_program().copy()
    before = {name for name in (ORIGIN.get(node) for node in program.graph.nodes) if name}
    for site in sites(program):
        pieces, target = site.pieces(number), site.launch.target
        if pieces is None:
            assert number == 4 and target is not all_gather, "3 positions of a rank are cut into no 4, its samples are"
            continue
        count = sum(node.target is target for node in program.graph.nodes)
        write(program.graph, site, pieces)
        assert sum(node.target is target for node in program.graph.nodes) == count + number - 1
    program.graph.lint()
    check(program)
    assert {CHUNK[node] for node in program.graph.nodes if node in CHUNK} == set(range(number))
    assert before == {name for name in (ORIGIN.get(node) for node in program.graph.nodes) if name}, "each value has a part still"
