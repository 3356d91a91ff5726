"""Print how much of a long file has been read."""

from __future__ import annotations

import sys

# A shorter file is read within a second.
_LINES = 100_000


class Progress:
    """Print a line to stderr after each 100,000 lines of a file.

    On a terminal, each line replaces the one before.
    """

    def __init__(self, size: int) -> None:
        self.size, self.lines, self.bytes = size, 0, 0

    def add(self, line: bytes) -> None:
        """Count a line that has been read."""
        self.lines += 1
        self.bytes += len(line)
        if self.lines % _LINES == 0:
            end = "\r" if sys.stderr.isatty() else "\n"
            text = f"read {self.lines:,} lines, {self.bytes / self.size:.0%}"
            print(text, end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Keep the last line on a terminal from being overwritten."""
        if self.lines >= _LINES and sys.stderr.isatty():
            print(file=sys.stderr)
