"""Which collectives may be cut with the products beside them."""

from __future__ import annotations

from autopar.graph.chunk_sites import Site, sites
from autopar.ir.collectives import all_gather, reduce_scatter
from autopar.ir.program import Program
from autopar.passes.local.chunk_collectives import ChunkCollectives
from tests.equivalence.test_chunks import blocks


def local_program() -> Program:
    """Blocks on tp=2, [4, 6, 8] in all, sequence parallel between the products."""
    parallel, _ = blocks("off", tp=2)
    program = next(step.program for step in parallel.compiled.steps if step.kind is ChunkCollectives)
    assert isinstance(program, Program)
    return program


def of_kind(found: tuple[Site, ...], target: object) -> list[Site]:
    return [site for site in found if site.launch.target is target]


def test_gathers_have_products_behind_them_and_sums_before_them() -> None:
    found = sites(local_program())
    gathers, sums = of_kind(found, all_gather), of_kind(found, reduce_scatter)
    assert gathers and sums and len(gathers) + len(sums) == len(found)
    assert all(product > site.launch for site in gathers for product in site.products)
    assert all(product < site.launch for site in sums for product in site.products)
    calls = [call for site in found for call in site.calls]
    assert len(calls) == len(set(calls)), "no call is in two sites"


def test_products_that_add_up_rows_are_none() -> None:
    """Gradients of weights read what was gathered, all rows of it."""
    program = local_program()
    products = {product for site in sites(program) for product in site.products}
    gradients = [node for node in program.graph.nodes if str(node.target) == "aten.mm.default" and node not in products]
    assert any(24 in node.args[0].meta["val"].shape[1:] for node in gradients), "24 rows in all are their inner dim"
    assert not any(node.args[0].meta["val"].shape[1] == 24 for node in products)


def test_rows_are_cut_along_the_outermost_dim_that_divides() -> None:
    site = of_kind(sites(local_program()), all_gather)[0]
    along_batch, along_sequence = site.pieces(4), site.pieces(3)
    assert along_batch is not None and along_batch.of_operands[site.launch.all_input_nodes[0]] == (24, 4)
    assert along_sequence is not None and along_sequence.of_operands[site.launch.all_input_nodes[0]] == (8, 3)
    assert site.pieces(5) is None
