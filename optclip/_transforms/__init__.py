"""Clipping as optax transformations, with their state and record."""

from ._clipping import clip_by, clip_by_value
from ._engine import Engine, Noted, is_placeholder, noting_engines, with_optional_state
from ._record import check_record
from ._rules import rules_of
from ._shared_norms import sharing_norms
