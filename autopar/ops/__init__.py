"""What ops are to the sharder: rules, atoms, strategies, local forms."""
