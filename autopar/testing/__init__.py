"""What proves the compiler itself: rules run whole and in parts, random legal decisions."""
