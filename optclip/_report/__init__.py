"""Report on a logged run, from the command line.

`_log_file` reads a file into a `_table`, in which `_log` finds the norms. `_report`
holds what is known about them, which `_text`, `_json` and `_page` write.
"""

from ._command import main
