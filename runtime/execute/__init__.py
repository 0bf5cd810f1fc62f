"""Ranks: what runs a schedule, and how ranks talk."""
