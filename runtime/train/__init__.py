"""Training steps with their updates: optimizers called part by part, scales, averages."""
