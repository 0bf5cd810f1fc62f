"""The pass manager, the options of a compile, and its result."""
