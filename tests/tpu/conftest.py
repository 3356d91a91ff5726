"""Collected only by path: libtpu wants an environment of its own."""

import os
import pathlib

HERE = pathlib.Path(__file__).parent.resolve()

# No TPU is looked for: its compiler alone is wanted.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"


def pytest_ignore_collect(collection_path, config):
    given = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    asked = any(path.resolve().is_relative_to(HERE) for path in given)
    return None if asked else True
