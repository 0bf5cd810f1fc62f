"""The sharding search: the problem, its solver, and why nothing fits where nothing does."""
