"""Test optclip with model, checkpoint and logging libraries."""
