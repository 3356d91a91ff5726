"""Inputs on which optax is silently wrong or fails, run with it and with optclip."""
