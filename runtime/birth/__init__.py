"""Values for a model that has none: from its own initialisers, from files, or from rank 0."""
