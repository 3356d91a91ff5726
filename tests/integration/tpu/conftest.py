"""libtpu wants an environment of its own."""

import os

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler_alone():
    """No TPU is looked for, and no program kept: without one it cannot be read."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
