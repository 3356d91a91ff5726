"""What other people's code of a method does, run from a checkout of it."""
