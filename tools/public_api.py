"""Every public name with its arguments, defaults or value, kept in `public_api.txt`.

    python -m tools.public_api     # write that file anew

A default that changes by itself changes what a run does: it is to be seen in a diff.
"""

import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import optclip
from optclip import (
    functional,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    thresholds,
    typing,
)

FILE = pathlib.Path(__file__).with_suffix(".txt")
MODULES = (
    optclip, functional, norms, per_example, plot, recipes, responses, thresholds, typing,
)  # fmt: skip


def text() -> str:
    lines = [line for module in MODULES for line in _lines(module)]
    return "\n".join(lines) + "\n"


def _lines(module: Any) -> Iterator[str]:
    for name in module.__all__:
        found = getattr(module, name)
        path = f"{module.__name__}.{name}"
        yield path + _details(found)


def _details(found: Any) -> str:
    if _has_arguments(found):
        return _arguments(found)
    is_ours = type(found).__module__.startswith("optclip")
    return f" = {found!r}" if is_ours else ""


def _has_arguments(found: Any) -> bool:
    is_protocol = getattr(found, "_is_protocol", False)
    is_typed_dict = hasattr(found, "__required_keys__")
    own = getattr(found, "__module__", "").startswith("optclip")
    is_callable = inspect.isclass(found) or inspect.isfunction(found)
    return own and is_callable and not is_protocol and not is_typed_dict


def _arguments(found: Any) -> str:
    """The signature without types, which the type checker looks after."""
    parameters = inspect.signature(found).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


if __name__ == "__main__":
    FILE.write_text(text())
