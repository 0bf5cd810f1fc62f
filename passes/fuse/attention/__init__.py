"""The ways in which people write attention, taken apart: what `FuseAttention` (`passes/forward/fuse_attention.py`) is made of.

layout.py        which label every dim carries, through views, permutes and expands, walking upwards
contractions.py  matmul, bmm, baddbmm and einsum as one thing
softmax.py       every spelling of a softmax
sinks.py         a softmax of the scores and one more, which belongs to no key
scores.py        from the softmax up to the product of queries and keys: scales, soft caps and masks
weights.py       from the product with the values up to the softmax: dropout, casts, factors
origins.py       what queries, keys and values were before they were scaled, repeated and moved
constants.py     values that are known before the program runs
documents.py     comparisons of ids: which rows and keys belong to one document
choices.py       added masks that are fills
masks.py         what the masks mean together: causal, window, documents, bool, added
match.py         one attention, whole; `refused.py` says why a near miss is none
write.py         `autopar.attention` in its place
"""
