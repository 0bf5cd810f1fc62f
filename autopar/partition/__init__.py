"""The sharding search: the problem, its solver, and why it has no answer where it has none."""
