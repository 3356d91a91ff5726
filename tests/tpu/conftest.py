"""Collected only by path: libtpu wants an environment of its own."""

import os
import pathlib

import jax
import pytest

HERE = pathlib.Path(__file__).parent.resolve()


def pytest_ignore_collect(collection_path, config):
    given = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    asked = any(path.resolve().is_relative_to(HERE) for path in given)
    return None if asked else True


@pytest.fixture(autouse=True, scope="session")
def compiler_alone():
    """No TPU is looked for, and no program kept: without one it cannot be read."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
