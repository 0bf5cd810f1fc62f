"""From the user's model to a FORWARD program."""
