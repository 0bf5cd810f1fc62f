"""Invariants of programs and schedules, checked after every pass and before anything runs."""
