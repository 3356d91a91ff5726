"""The table of docs/migrating.md: inputs on which optax fails."""

import re

import numpy as np
import optax

from docs.plots_and_tables import comparison

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def test_comparison_table_matches_run():
    """The column of optax is compared if the page names the installed version."""
    tables = [
        [line.split("|") for line in table.splitlines()]
        for table in (comparison.current_table(), comparison.new_table())
    ]
    same_optax = f" optax {optax.__version__} " in tables[0][0]
    for cells, expected in zip(*tables, strict=True):
        if not same_optax:
            del cells[2], expected[2]
        line, new = "|".join(cells), "|".join(expected)
        assert NUMBER.split(line) == NUMBER.split(new)
        # Another CPU may round the third digit differently.
        numbers = (np.float64(NUMBER.findall(text)) for text in (line, new))
        np.testing.assert_allclose(*numbers, rtol=2e-3)
