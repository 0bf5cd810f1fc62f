"""What nobody reads is left out, unless it does more than give a result."""

from __future__ import annotations

from torch.fx import Graph

from autopar.graph.overwrites import statistics_of


def remove_dead_code(graph: Graph) -> None:
    """As `Graph.eliminate_dead_code`, which goes by schemas: those of norms that move running statistics do not say so."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(statistics_of(node)))
