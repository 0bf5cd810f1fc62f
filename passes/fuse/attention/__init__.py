"""The ways in which people write attention: what `FuseAttention` (`passes/forward/fuse_attention.py`) reads.

layout.py           which label every dim carries, through views, permutes and expands, walking upwards; and back to what the op takes
contractions.py     matmul, bmm, baddbmm and einsum as one thing
softmax.py          every spelling of a softmax, with a sink or without
scores.py           from the softmax up to the product of queries and keys: scales, soft caps and masks
weights.py          from the product with the values up to the softmax: dropout, casts, factors
operand_sources.py  what queries, keys and values were before they were scaled, repeated and moved
conditions.py       several conditions as one, ids of documents that they compare, added masks that are fills
masks.py            what the masks mean together: causal, window, documents, bool, added
match.py            one attention, whole
form.py             one attention as the op takes it, and `autopar.attention` in its place
"""
