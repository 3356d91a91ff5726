"""Clipping in Keras optimizers: its state is in their variables."""
