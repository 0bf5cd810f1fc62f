"""What was decided, as data: written, read, compared; what the user fixes beforehand."""
