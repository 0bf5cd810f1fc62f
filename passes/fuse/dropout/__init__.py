"""Dropout as `KeyRandom` leaves it: what `FuseDropout` (`passes/forward/fuse_dropout.py`) reads.

draw.py    a mask as the positions, words and bound that it was drawn from
match.py   one dropout, with the sum that reads it or alone, and the op in its place
"""
