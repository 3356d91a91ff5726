"""Settings and imports of the libraries, without the warnings of their modules."""

import os
import tempfile
import warnings

import pytest

# Read at import. Keras must not use the user's settings.
os.environ |= {
    "KERAS_BACKEND": "tensorflow",
    "KERAS_HOME": os.path.join(tempfile.gettempdir(), "optclip-parity-keras"),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
LIBRARIES = ("tensorflow", "keras", "torch", "google", "absl")
with warnings.catch_warnings(action="ignore"):
    for library in ("tensorflow", "keras", "torch"):
        __import__(library)


def pytest_itemcollected(item):
    for library in LIBRARIES:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:::{library}"))
