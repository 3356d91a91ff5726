"""Read the clipping record: metrics, a printed summary, a suggested threshold."""

from . import _named_columns as named_columns
from ._cotangents import FIELDS as PROBE_FIELDS
from ._metrics import (
    Metric,
    keys_of_metrics,
    metrics,
    metrics_of,
    parts_in,
    percent,
    states_in,
    transform_of,
)
from ._named_columns import Column
from ._read_history import (
    chosen,
    has_run,
    others_in,
    outer_skip,
    read,
    skipped_in,
)
from ._suggest import Suggestion, suggest
from ._summary import summary
