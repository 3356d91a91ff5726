"""Names of `monitor` that other packages of optclip use, besides the public ones."""

from optclip.monitor._metrics import parts_in as parts_in
from optclip.monitor._metrics import percent as percent
from optclip.monitor._read_history import chosen as chosen
from optclip.monitor._read_history import read as read
