"""Read the clipping record: metrics, a printed summary, a suggested threshold."""

from . import _named_columns as named_columns
from ._metrics import (
    PART_FIELDS,
    Metric,
    metrics,
    metrics_of,
    parts_in,
    percent,
    states_in,
)
from ._named_columns import Column
from ._read_history import chosen, has_run, outer_skip, read, skipped_in
