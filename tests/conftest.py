"""Eight CPU devices; deterministic hypothesis; warnings are errors (pyproject)."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """A function as it is, and compiled."""
    return jax.jit if request.param == "jit" else lambda function: function
