"""Run the command line: `python -m optclip report run.jsonl`."""

import sys

from . import __version__
from ._report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __version__))
