"""The ways in which people write norms, taken apart: what `FuseNorms` (`passes/forward/fuse_norms.py`) is made of.

reading.py   values up to casts, means over the last dim, squares, what is centred, roots
by_hand.py   one norm in plain ops, from the product (quotient) that scales upwards
match.py     one norm, whole, with what follows it: casts, weight, bias; `refused.py` says why a near miss is none
residual.py  the sum that is normalised, where it can be computed inside
write.py     `autopar.norm` or `autopar.add_norm` in its place
"""
