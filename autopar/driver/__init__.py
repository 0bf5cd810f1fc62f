"""What runs passes, and what a compile leaves behind."""
