"""Run optax's own tests with optclip's clipping instead of optax's.

    python -m tests.integration.parity.optax_with_optclip

Exits with 0 if every replacement was called and the tests pass.
"""

import functools
import importlib.util
import os
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
# Ignores this project's settings and writes no cache into optax's folder. The test of
# the RMS is off by one rounding with optax's own clipping too.
OPTIONS = ("-q", "-c", os.devnull, "-p", "no:cacheprovider", "-k", "not block_rms")


def clippings():
    """Return functions with optax's names and arguments."""

    def clip(max_delta):
        return optclip.clip_by_value(max_delta)

    def clip_by_global_norm(max_norm):
        return optclip.clip_by_global_norm(max_norm)

    def adaptive_grad_clip(clipping, eps=1e-3, axis=None):
        axis_of_leaf = None if axis is None else lambda path, shape: axis
        return optclip.recipes.agc(clipping, eps, axis=axis_of_leaf)

    return clip, clip_by_global_norm, adaptive_grad_clip


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


def main():
    """Run the tests and return the exit code."""
    calls = Counter()
    functions = [counted(f, calls) for f in clippings()]
    replace(functions)
    files = [importlib.util.find_spec(suite).origin for suite in SUITES]
    code = pytest.main([*OPTIONS, *files])
    print("Calls:", dict(calls))
    return int(code) or int(len(calls) < len(functions))


if __name__ == "__main__":
    sys.exit(main())
