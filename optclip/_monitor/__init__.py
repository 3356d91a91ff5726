"""Read the clipping record: metrics, a printed summary, a suggested threshold."""

from ._metrics import parts_in, percent
from ._read_history import chosen, read
