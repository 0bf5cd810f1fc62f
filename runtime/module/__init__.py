"""The module that a user trains: calls, parameters, state."""
