"""Report on a logged run, from the command line.

`_log` reads a file and finds the norms in it. `_report` says what is known about them,
as text and JSON, and `_page` as a page with plots.
"""

from ._command import main
