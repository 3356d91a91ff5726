"""Clipping as pure functions: `_clipping`, and the run that they share, `_run`."""

from ._clipping import clip_by
from ._run import raise_if_exchanged
