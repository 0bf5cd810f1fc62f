"""Seconds and bytes, and the hardware that they are of."""
