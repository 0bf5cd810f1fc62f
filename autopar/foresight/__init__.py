"""What a step would take on a cluster that nobody has started: seconds and bytes, from the captured graph of the model."""
