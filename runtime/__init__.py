"""The runtime: ranks that interpret a schedule over a transport."""
