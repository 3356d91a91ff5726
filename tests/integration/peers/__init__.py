"""Clipping tests of other libraries, run with optclip in place of their functions."""
