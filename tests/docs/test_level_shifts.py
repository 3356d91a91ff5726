"""The table of docs/choosing_a_threshold.md: steps that rules need after a shift."""

from docs.plots_and_tables import level_shift_table as table
from tests.support import covering

# Two rows without a window, which are fast; the others run with `--full`.
QUICK = ["`olmo_ratio()`", "`zclip(max_norm=inf)`, `thresholds.zscore()`"]


def test_level_shift_table_matches_run():
    """If not, run `python -m docs.plots_and_tables.level_shift_table`."""
    page = table.PAGE.read_text()
    for name in table.ROWS if covering.full else QUICK:
        assert table.row(name) in page
