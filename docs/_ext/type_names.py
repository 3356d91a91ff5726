"""Signatures say `Threshold`, as the code does, and not all that it may be.

Autodoc would write out what each name of `optclip.typing` stands for.
"""

import inspect
import re
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

from optclip import typing

NAME = re.compile(r"[A-Za-z_][\w.]*")


class Bare(str):
    """An annotation, which `inspect` puts into quotes if it is a plain string."""

    def __repr__(self) -> str:
        return str(self)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write each signature anew."""
    app.connect("autodoc-process-signature", written)
    return {"parallel_read_safe": True}


def written(
    app: Sphinx,
    what: str,
    name: str,
    value: Any,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """The signature and what is returned, with links, as they stand in the code."""
    if not inspect.isfunction(value):
        return signature, returned
    found = inspect.signature(value)
    # A decorator has other globals than the function that it wraps.
    known = inspect.unwrap(value).__globals__
    parameters = [
        p.replace(annotation=linked(p.annotation, known))
        for p in found.parameters.values()
        if not (what == "method" and p.name == "self")
    ]
    if not isinstance(found.return_annotation, str):
        return signature, returned
    bare = found.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    return str(bare), str(linked(found.return_annotation, known))


def linked(annotation: Any, known: dict[str, Any]) -> Any:
    """Each name in full, of which the page shows the last part."""

    def full(match: re.Match[str]) -> str:
        name = match[0]
        root, _, rest = name.partition(".")
        if name in typing.__all__:
            return f"~optclip.typing.{name}"
        value = known.get(root)
        if isinstance(value, ModuleType):
            return f"~{value.__name__}.{rest}"
        module = getattr(value, "__module__", None)
        return f"~{module}.{name}" if isinstance(module, str) else name

    return (
        Bare(NAME.sub(full, annotation)) if isinstance(annotation, str) else annotation
    )
