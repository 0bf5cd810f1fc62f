"""Passes on the FORWARD program: before autograd derives the backward."""
