"""Forms in which users write what is an op of ours: how each is read, and written anew."""
