"""A fixture for test modules whose results do not depend on XLA's optimizations."""

import jax
import pytest

from tests.support import covering


@pytest.fixture(autouse=True, scope="module")
def unoptimized():
    """Compile without most optimizations, eager operations too; not with `--full`."""
    jax.config.update("jax_disable_most_optimizations", not covering.full)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
