"""The ways in which people write norms: what `FuseNorms` (`passes/forward/fuse_norms.py`) reads.

moments.py  values up to casts, means and variances over the last dim, squares, what is centred, roots
by_hand.py  one norm in plain ops, from the product (quotient) that scales upwards
match.py    one norm with its weight, bias and the sum that it is of, and the op in its place
"""
