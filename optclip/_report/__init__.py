"""Report on a logged run, from the command line.

`_entries` reads a file, of which `_formats` parses the text. `_log` finds the norms and
the loss in its entries. `_report` says what is known about them, as text and JSON, and
`_page` as a page with plots.
"""

from ._command import main
