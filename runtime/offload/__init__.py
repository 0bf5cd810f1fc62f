"""What is away from the device: memory of the host and files, and who copies."""
