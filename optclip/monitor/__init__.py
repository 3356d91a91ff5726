"""Read the clipping record: metrics, a printed summary, a suggested threshold."""

from optclip.monitor._metrics import metrics as metrics
from optclip.monitor._suggest import Suggestion as Suggestion
from optclip.monitor._suggest import suggest as suggest
from optclip.monitor._summary import summary as summary
