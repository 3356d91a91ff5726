"""How public names appear in `help`, on hover, in pickles, errors and on the site."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ForwardRef, NoReturn

# Names in other libraries, and their counterparts here.
_ELSEWHERE = {
    "adaptive_grad_clip": "recipes.agc",
    "apply_if_finite": "skip",
    "clip": "clip_by_value",
    "clip_by_block_rms": "clip_by_rms",
    "clip_grad_norm": "functional.clip_by_global_norm",
    "clip_grad_norm_": "functional.clip_by_global_norm",
    "clip_grad_value_": "functional.clip_by_value",
    "skip_not_finite": "skip",
    "qk_clip": "clip_attention_logits",
}


class _Annotation(str):
    """Print an annotation without quotes in signatures.

    `typing.get_type_hints` evaluates it like any other string.
    """

    __slots__ = ()
    __repr__ = str.__str__


def name_public_paths(*modules: types.ModuleType) -> None:
    """Make classes name the module to import them from, so that pickles outlive moves.

    Args:
      modules: Public modules.
    """
    for module in modules:
        for value in _public(module):
            if isinstance(value, type):
                # Strings would be evaluated in the public module, which lacks names.
                hints = typing.get_type_hints(value)
                own = inspect.get_annotations(value)
                value.__annotations__ = {name: hints[name] for name in own}
                value.__module__ = module.__name__


def explain_missing_names(module: types.ModuleType) -> None:
    """Make a module name its counterparts of names in other libraries.

    Args:
      module: A public module, which holds only imports.
    """

    def lacks(name: str) -> NoReturn:
        raise lacking(module.__name__, name, module.__all__)

    module.__dict__["__getattr__"] = lacks


def lacking(
    module: str, name: str, own: Iterable[str] = (), found: Iterable[str] = ()
) -> AttributeError:
    """Return the error for a name that a module lacks, with its counterparts.

    Args:
      module: Name of the module.
      name: The name.
      own: Names of the module that are preferred to those elsewhere.
      found: Full names of the same name in other modules.
    """
    if name in _ELSEWHERE:
        there = _ELSEWHERE[name]
        last = there.rpartition(".")[2]
        package = module.partition(".")[0]
        found = [f"{module}.{last}" if last in own else f"{package}.{there}"]
    hint = " or ".join(found)
    hint = f". Did you mean {hint}?" if hint else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def print_names_of_types(*modules: types.ModuleType) -> None:
    """Make signatures show the names of types, neither quoted nor expanded.

    Args:
      modules: Public modules, whose annotations are strings.
    """
    for value in _public(*modules):
        for function in _functions(value):
            written = function.__annotations__
            for name, annotation in written.items():
                if isinstance(annotation, ForwardRef):  # In a NamedTuple.
                    annotation = annotation.__forward_arg__
                if isinstance(annotation, str):
                    written[name] = _Annotation(annotation)


def _public(*modules: types.ModuleType) -> list[Any]:
    found = [getattr(m, name) for m in modules for name in m.__all__]
    # The name of this package, which differs in a copy of it.
    ours = __name__.rpartition(".")[0]
    return [
        v for v in found if f"{getattr(v, '__module__', '')}.".startswith(f"{ours}.")
    ]


def _functions(value: Any) -> Iterator[Callable[..., Any]]:
    if not inspect.isclass(value):
        yield from filter(inspect.isfunction, [value])
        return
    names = [n for n in vars(value) if not n.startswith("_")]
    for name in ("__new__", "__init__", *names):
        member = inspect.getattr_static(value, name, None)
        yield from filter(inspect.isfunction, [getattr(member, "__func__", member)])
