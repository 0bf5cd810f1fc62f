"""Passes on the GLOBAL program: forward and backward in logical shapes, up to every decision about ranks."""
