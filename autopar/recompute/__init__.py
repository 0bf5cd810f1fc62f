"""What the backward computes again instead of keeping it: which values may be, which are, and the graph that follows."""
