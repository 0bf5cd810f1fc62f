"""The ways in which people write gated activations, taken apart: what `FuseGates` (`passes/forward/fuse_gates.py`) is made of.

factors.py      a product as numbers and factors, one level deep
activations.py  the five activations, by name or written by hand
polynomials.py  what an activation by hand computes of its operand
checks.py       what must hold around every rewrite
match.py        one gate, whole; `refused.py` says why a near miss is none
bias.py         one activation of a sum with a bias
write.py        the ops in their place
"""
