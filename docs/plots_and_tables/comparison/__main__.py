"""Write the table of `docs/migrating.md`.

Run `python -m docs.plots_and_tables.comparison`.
"""

import jax

from docs.plots_and_tables.comparison import page

if __name__ == "__main__":
    # Two rows shard their updates over eight devices, which JAX simulates on a CPU.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    page.PATH.write_text(page.with_table(page.PATH.read_text()))
