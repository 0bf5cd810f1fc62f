"""Dropout as `KeyRandom` leaves it, taken apart: what `FuseDropout` (`passes/forward/fuse_dropout.py`) is made of.

draw.py    a mask as the positions, words and bound that it was drawn from
match.py   one dropout, with the sum that reads it or alone
write.py   `autopar.add_dropout` or `autopar.dropout` in its place
"""
