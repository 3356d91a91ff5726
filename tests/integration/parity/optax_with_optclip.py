"""Run optax's own tests with optclip's clipping instead of optax's.

Usage, with `True` or `False` for `record=`:

    python -m tests.integration.parity.optax_with_optclip True

Exits with 0 if every replacement was called and no test fails that passes with optax's.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from collections import Counter

import optax
import pytest

import optclip

# optax installs its tests, whose modules have private names.
SUITES = (
    "optax.transforms._clipping_test",
    "optax.transforms._monitoring_test",
    "optax.schedules._inject_test",
    "optax.contrib._privacy_test",
    "optax._src.float64_test",
)
# Ignores this project's settings and writes no cache into optax's folder.
OPTIONS = ("-q", "-c", os.devnull, "-p", "no:cacheprovider")


def clippings(record):
    """Return functions with optax's names and arguments."""

    def clip(max_delta):
        return optclip.clip_by_value(max_delta, record=record)

    def clip_by_block_rms(threshold):
        return optclip.clip_by_rms(threshold, record=record)

    def clip_by_global_norm(max_norm):
        return optclip.clip_by_global_norm(max_norm, record=record)

    def adaptive_grad_clip(clipping, eps=1e-3, axis=None):
        axis_of_leaf = None if axis is None else lambda path, shape: axis
        return optclip.recipes.agc(clipping, eps, axis=axis_of_leaf, record=record)

    return clip, clip_by_block_rms, clip_by_global_norm, adaptive_grad_clip


def counted(function, calls):
    """Count the calls of a function."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def replace(functions):
    """Replace optax's functions of the same names in all of its modules."""
    originals = {id(getattr(optax, f.__name__)): f for f in functions}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "optax":
            for key, value in list(vars(module).items()):
                if id(value) in originals:
                    setattr(module, key, originals[id(value)])


class Failures:
    """Collect the tests that failed."""

    def __init__(self):
        self.paths, self.failed = {}, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            name = item.nodeid.partition("::")[2]
            self.paths[item.nodeid] = f"{item.path}::{name}"

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed[self.paths[report.nodeid]] = None


def passes_unchanged(test):
    """Return whether a test passes with optax's own clipping."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, test]
    return (
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0
    )


def main(record):
    """Run the tests and return the exit code."""
    calls, failures = Counter(), Failures()
    functions = [counted(f, calls) for f in clippings(record)]
    replace(functions)
    files = [importlib.util.find_spec(suite).origin for suite in SUITES]
    code = pytest.main([*OPTIONS, *files], plugins=[failures])
    print("Calls:", dict(calls))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    ours = [test for test in failures.failed if passes_unchanged(test)]
    print("Failed only with optclip:", ours)
    return int(bool(ours) or len(calls) < len(functions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] == "True"))
