"""Run the command line: `python -m optclip report run.jsonl`."""

import sys

from . import __version__
from ._report import main

sys.exit(main(sys.argv[1:], __version__))
