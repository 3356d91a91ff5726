"""Clipping as pure functions."""

from ._clipping import clip_by, raise_if_exchanged
