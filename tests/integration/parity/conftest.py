"""Collected only by path; the libraries' own warnings pass; one line each at the end."""

import pytest

from .tally import Tally

# Warnings are errors in this repository; those that the libraries raise in their own
# modules, in calls that are right, are not ours to mend.
LIBRARIES = ("tensorflow", "keras", "torch", "google", "absl")


def pytest_itemcollected(item):
    for library in LIBRARIES:
        mark = pytest.mark.filterwarnings(f"ignore:::{library}")
        item.add_marker(mark)


def pytest_terminal_summary(terminalreporter):
    """One line for each library."""
    found: dict[str, list] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name == "parity":
                    found.setdefault(value[0], []).append(value[1:])
    for library, tallies in sorted(found.items()):
        terminalreporter.write_line(_line(library, tallies))


def _line(library, tallies):
    cases, mismatches = (sum(t[i] for t in tallies) for i in (0, 1))
    worst: dict[str, float] = {}
    for *_, by_dtype in tallies:
        for dtype, size in by_dtype.items():
            worst[dtype] = max(worst.get(dtype, 0.0), size)
    order = ("float32", "float64", "bfloat16", "float16")
    sizes = ", ".join(f"{worst[d]:.1e} {d}" for d in order if d in worst)
    return (
        f"parity: {library} {cases} cases, {mismatches} mismatches, worst relative"
        f" difference {sizes}"
    )


@pytest.fixture
def tally(record_property):
    """`tally("torch")` counts the cases of a test for its library."""
    return lambda library: Tally(library, record_property)
