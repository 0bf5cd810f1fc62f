"""The ways in which people write rotary embeddings: what `FuseRotary` (`passes/forward/fuse_rotary.py`) reads.

elements.py  every element of the last dim as a sum of x's elements times angles, whatever slices, stacks and views made it
angles.py    cosines and sines as the op takes them
match.py     one rotation, and the op in its place
"""
