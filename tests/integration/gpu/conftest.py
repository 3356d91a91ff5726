"""Settings for the GPU compiler."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler_alone():
    """Load the CUDA plugin without a driver, and cache no programs, which lack dumps."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
