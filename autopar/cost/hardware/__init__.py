"""What the program runs on: devices, the links between them, and how to measure both."""
