"""Read what a clip did: its metrics, a summary in words, a threshold to try."""

from optclip.monitor._metrics import metrics as metrics
from optclip.monitor._suggest import Suggestion as Suggestion
from optclip.monitor._suggest import suggest as suggest
from optclip.monitor._summary import summary as summary
