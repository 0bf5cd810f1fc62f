"""The passes, one a file, in folders by the form that they rewrite; `default_passes` in `autopar/compiler.py` is their order."""
