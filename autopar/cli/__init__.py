"""The command line: `autopar plan`, `explain`, `compare`, `doctor`."""
