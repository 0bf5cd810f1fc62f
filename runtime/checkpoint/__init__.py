"""Checkpoints: what a run goes on from, on any mesh, in safetensors files and one JSON index."""
