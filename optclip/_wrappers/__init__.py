"""Wrappers of an optimizer or a clipping transformation, one per file."""

from ._addresses import rule_text
from ._checks import transformation
from ._clip_after import clip_after
from ._periodic_reset import with_periodic_reset
from ._skip import skip
