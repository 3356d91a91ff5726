"""Import the libraries to compare with, or skip the tests; fail under CI."""

import importlib
import os
import tempfile
import warnings
from types import ModuleType

import pytest

# Read at import. Keras must not use the user's settings.
_SETTINGS = {
    "KERAS_BACKEND": "tensorflow",
    "KERAS_HOME": os.path.join(tempfile.gettempdir(), "optclip-parity-keras"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def load(name: str) -> ModuleType:
    """Import a library without its warnings.

    If it is not installed, the calling test module is skipped. With CI=true the error
    is raised, so that continuous integration cannot pass without the comparison.
    """
    for key, value in _SETTINGS.items():
        os.environ[key] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            absent = error.name == name.partition(".")[0]
            if not absent or os.environ.get("CI", "") not in ("", "0", "false"):
                raise
    pytest.skip(
        f"{name} is not installed: pip install --group parity", allow_module_level=True
    )
