"""The cost model, in seconds and bytes, and the hardware that it is given."""
