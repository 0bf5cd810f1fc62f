"""Helpers of passes that rewrite graphs: emitting calls, values known beforehand, memory that is written, random draws."""
