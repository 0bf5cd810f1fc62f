"""Passes on the LOCAL program: what one rank runs, in local shapes."""
