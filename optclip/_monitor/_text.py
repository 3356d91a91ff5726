"""Format numbers, lists and lines of text."""

from __future__ import annotations

import textwrap

# The columns of a terminal. A code block of the documentation has a few more.
_WRAPPER = textwrap.TextWrapper(
    80, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
)


def percent(fraction: float) -> str:
    """Return whole percent; "0%" means none and "100%" all, despite rounding."""
    rounded = f"{fraction:.0%}"
    if rounded == "0%" and fraction > 0:
        return "<1%"
    # Rates are float32, so that a rate of 1 may be stored as the number below 1.
    return ">99%" if rounded == "100%" and fraction < 1 - 1e-6 else rounded


def listed(words: list[str]) -> str:
    """Return the first three words, and the number of the others."""
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return ", ".join(words[:3]) + more


def wrapped(text: str) -> str:
    """Wrap long lines; rows of tables, which begin with a space, stay whole."""
    lines = text.split("\n")
    return "\n".join(x if x[:1] == " " else _WRAPPER.fill(x) for x in lines)
