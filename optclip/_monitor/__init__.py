"""Read the clipping record: metrics, a printed summary, a suggested threshold."""

from ._history import (
    Column,
    array_of,
    columns_in,
    columns_of,
    history,
    key_of_rows,
    text_of,
)
from ._metrics import PROBE_FIELDS, Metric, metrics, metrics_of, states_in
from ._ordered_run import ranges
from ._outliers import outliers, stands_out
from ._run import (
    Fields,
    at,
    chosen,
    clips_in,
    fields_by_name,
    has_run,
    is_rejected,
    likely_losses,
    loss_key,
    losses_of,
    number_of,
    only,
    others_in,
    outer_skip,
    read,
)
from ._suggest import Suggestion, choice, suggest
from ._summary import summarized, summary
from ._text import listed, percent, wrapped
