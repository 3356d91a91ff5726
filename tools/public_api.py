"""List every public name with its arguments, defaults or value in `public_api.txt`.

    python -m tools.public_api     # write the file

A changed default changes the results of users' runs, so it must show in a diff.
"""

import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import optclip
from optclip import (
    functional,
    keras,
    norms,
    per_example,
    plot,
    recipes,
    responses,
    scopes,
    thresholds,
    typing,
)

FILE = pathlib.Path(__file__).with_suffix(".txt")
MODULES = (
    optclip, functional, keras, norms, per_example, plot, recipes, responses, scopes,
    thresholds, typing,
)  # fmt: skip


def text() -> str:
    lines = [line for module in MODULES for line in _lines(module)]
    return "\n".join(lines) + "\n"


def _lines(module: Any) -> Iterator[str]:
    for name in module.__all__:
        path = f"{module.__name__}.{name}"
        yield path + _details(getattr(module, name))


def _details(value: Any) -> str:
    if _has_arguments(value):
        return _arguments(value)
    is_ours = type(value).__module__.startswith("optclip")
    return f" = {value!r}" if is_ours else ""


def _has_arguments(value: Any) -> bool:
    is_protocol = getattr(value, "_is_protocol", False)
    is_typed_dict = hasattr(value, "__required_keys__")
    is_ours = getattr(value, "__module__", "").startswith("optclip")
    is_callable = inspect.isclass(value) or inspect.isfunction(value)
    return is_ours and is_callable and not is_protocol and not is_typed_dict


def _arguments(value: Any) -> str:
    """Return the signature without types, which the type checker covers."""
    parameters = inspect.signature(value).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))


if __name__ == "__main__":
    FILE.write_text(text())
