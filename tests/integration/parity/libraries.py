"""The libraries to compare with: imported, skipped, or under CI a failure."""

import importlib
import os
import tempfile
import warnings
from types import ModuleType

import pytest

# What they read once, at import. Keras is kept from the user's own settings.
_SETTINGS = {
    "KERAS_BACKEND": "tensorflow",
    "KERAS_HOME": os.path.join(tempfile.gettempdir(), "optclip-parity-keras"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def load(name: str) -> ModuleType:
    """The library, its own import warnings unheard.

    Where it is not installed the module that asks is skipped; with CI=true the error
    stands, so that continuous integration cannot pass without having compared.
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
