"""Nodes have names that hold in another session, and equal graphs have equal fingerprints."""

from __future__ import annotations

import torch

from autopar.plans.keys import cut_keys, fingerprint, node_keys
from tests.support.planned import program

aten = torch.ops.aten


def test_names_do_not_depend_on_node_names_nor_on_reshards() -> None:
    keys = ["forward h.0.fc aten.mm 0", "forward h.0.fc aten.relu 0", "forward h.0.fc aten.relu 1"]
    for each in (program(), program(prefix="other_"), program(with_reshard=True)):
        assert list(node_keys(each).values()) == keys
        assert fingerprint(each) == fingerprint(program())


def test_fingerprint_tells_graphs_apart() -> None:
    other = program()
    relu = other.node("relu_default")
    relu.target = aten.neg.default
    prints = {fingerprint(program()), fingerprint(program(width=12)), fingerprint(other)}
    assert len(prints) == 3


def test_reshards_have_keys_where_they_are_asked_for() -> None:
    one = program(with_reshard=True)
    keys = node_keys(one, with_reshards=True)
    assert set(keys.values()) - set(node_keys(one).values()) == {"forward - reshard 0"}
    assert all(keys[node] == key for node, key in node_keys(one).items())


def test_cuts_are_kept_by_the_keys_of_their_nodes() -> None:
    one = program(with_reshard=True)
    assert cut_keys(one, ("reshard", "relu_default_1")) == ("forward - reshard 0", "forward h.0.fc aten.relu 1")
