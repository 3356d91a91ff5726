"""`python -m tools.comparison` writes the table of docs/migrating.md."""

import jax

from tools.comparison import page

if __name__ == "__main__":
    # Two of the rows split their updates over eight devices, which any CPU can be.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    page.PATH.write_text(page.written(page.PATH.read_text()))
