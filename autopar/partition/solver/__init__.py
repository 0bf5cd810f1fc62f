"""The assignment problem and its solver: candidates, states and prices, and not a word of tensors."""
