"""Captures and joint traces in files, which later processes read in place of making them again."""
