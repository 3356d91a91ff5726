"""Clipping as pure functions."""

from ._clip_by import clip_by, raise_if_exchanged
