"""The ways in which people write rotary embeddings, taken apart: what `FuseRotary` (`passes/forward/fuse_rotary.py`) is made of.

elements.py  every element of the last dim as a sum of x's elements times angles, whatever slices, stacks and views made it
match.py     one rotation, whole
angles.py    cosines and sines as the op takes them
write.py     `autopar.rotary` in its place
"""
