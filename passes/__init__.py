"""The passes, one a file, in folders by the form that they rewrite; `default_passes.py` has their order."""
