"""Report on a logged run, from the command line.

`_log_file` reads a file, in which `_log` finds the norms. `_report` says what is known
about them, as text and JSON, and `_page` as a page with plots.
"""

from ._command import main
