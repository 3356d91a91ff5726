"""Corrections of what autodoc reads from the package."""

import re

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

STAND_IN = re.compile(r"TypeAliasForwardRef\('(.*?)'\)")
# The modules that define type aliases.
ALIASES = (
    "_arrays._types",
    "_norms._norm",
    "_responses._response_argument",
    "_scopes._scope",
    "_thresholds._rule",
)
INDEX = re.compile(r"^Index::\n+(?: .*\n+)+", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the texts of type aliases, and correct one docstring and signatures."""
    # Autodoc seeks the string below an assignment in the module that is documented.
    texts = ModuleAnalyzer.for_module("optclip.typing").find_attr_docs()
    for module in ALIASES:
        texts.update(ModuleAnalyzer.for_module(f"optclip.{module}").find_attr_docs())
    # Before Napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", without_index, priority=400)
    app.connect("autodoc-process-signature", with_aliases)
    return {"parallel_read_safe": True}


def without_index(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Delete the index from the docstring of `optclip`; its page has a list."""
    if name == "optclip":
        lines[:] = INDEX.sub("", "\n".join(lines)).split("\n")


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
        part and STAND_IN.sub(r"\1", part).replace("[[...]", "[...") for part in parts
    )
