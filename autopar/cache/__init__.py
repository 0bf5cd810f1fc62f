"""Compiles that other processes can use: what tells one from another, and the files they are in."""
