"""Clipping as optax transformations, with their state and record."""

from ._clip_by_transform import clip_by
from ._engine import Engine, lifted
from ._param_placeholder import is_placeholder
from ._positions import checks_positions
from ._record import check_record
from ._rules import rules_of
from ._value_transform import clip_by_value
