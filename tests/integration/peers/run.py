"""Run the clipping tests of a library with optclip in place of its functions.

    python -m tests.integration.peers.run optax

The wheel of the library contains the tests. Exits with 0 if the tests fail that `KNOWN`
in `optax_suite.py` lists, the number `PASSED` passes, and each replaced function was
called.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from fnmatch import fnmatch

import pytest

# Ignores this project's settings and writes no cache into the library's folder.
OPTIONS = ("-q", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore")


class Results:
    """Collect the outcome of each test and the functions that were called."""

    def __init__(self):
        self.passed, self.failed, self.called = set(), set(), set()

    def noted(self, function):
        """Note the calls of a function."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            self.called.add(function.__name__)
            return function(*args, **kwargs)

        return call

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)


def replace(library, owner, original, function):
    """Replace a function of a module or class, and in each module that imports it."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == library]
    for holder in (owner, *modules):
        for name, value in list(vars(holder).items()):
            if value is original:
                setattr(holder, name, function)


def main(library):
    """Run the tests and return the exit code."""
    suite = importlib.import_module(f".{library}_suite", __package__)
    results = Results()
    for owner, function in suite.OWNERS:
        original = getattr(owner, function.__name__)
        replace(library, owner, original, results.noted(function))
    files = [
        str(file.locate())
        for file in importlib.metadata.files(library)
        if any(fnmatch(str(file), pattern) for pattern in suite.FILES)
    ]
    pytest.main([*OPTIONS, "-k", suite.SELECT, *files], plugins=[results])
    unlike = {
        "fails, but is not listed": results.failed - suite.KNOWN.keys(),
        "is listed, but does not fail": suite.KNOWN.keys() - results.failed,
        "was never called": {f.__name__ for _, f in suite.OWNERS} - results.called,
    }
    for problem, names in unlike.items():
        for name in sorted(names):
            print(f"{name} {problem}")
    passed = len(results.passed)
    print(f"{passed} passed, {suite.PASSED} should; known: {suite.KNOWN}")
    return int(any(unlike.values()) or passed != suite.PASSED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
