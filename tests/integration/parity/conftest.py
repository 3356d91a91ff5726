"""Ignore warnings that the libraries raise in their own modules."""

import pytest

LIBRARIES = ("tensorflow", "keras", "torch", "google", "absl")


def pytest_itemcollected(item):
    for library in LIBRARIES:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:::{library}"))
