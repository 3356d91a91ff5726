"""Corrections of what autodoc reads from the package."""

import re

from sphinx.application import Sphinx

ALIAS = re.compile(r"TypeAliasForwardRef\('(.*?)'\)")


def setup(app: Sphinx) -> dict[str, bool]:
    """Correct signatures."""
    app.connect("autodoc-process-signature", with_aliases)
    return {"parallel_read_safe": True}


def with_aliases(
    app: Sphinx,
    what: str,
    name: str,
    value: object,
    options: object,
    *parts: str | None,
) -> tuple[str | None, ...]:
    """Print an alias in a union by its name, and `Callable[..., Any]` as in code.

    Sphinx 9 prints the `repr` of an object of its own, and `Callable[[...], Any]`.
    """
    return tuple(
        part and ALIAS.sub(r"\1", part).replace("[[...]", "[...") for part in parts
    )
