"""Rules for ops that have none: found by running the op, whole against split."""
