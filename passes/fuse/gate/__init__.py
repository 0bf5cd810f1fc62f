"""The ways in which people write gated activations: what `FuseGates` (`passes/forward/fuse_gates.py`) reads.

products.py     a product as numbers and factors, one level deep; a polynomial of one operand
activations.py  the five activations, by name or written by hand
match.py        one gate, or one activation of a sum with a bias, and the op in its place
"""
