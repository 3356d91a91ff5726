"""Settings for the TPU compiler."""

import os

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def compiler_alone():
    """Do not search for a TPU, nor cache programs, which only a TPU could load."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
