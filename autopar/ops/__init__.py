"""How ops can be sharded: rules, atoms, strategies, and the op that one rank runs."""
