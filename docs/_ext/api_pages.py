"""A page for each public name, made from `__all__` and the docstrings.

A module that `optclip.__all__` names gets a page with its docstring and its list, and
each name in its own `__all__` a page too: a new one needs no work. Public is what
`__all__` says.
"""

import importlib
import inspect
import pathlib
import textwrap
from types import ModuleType
from typing import Any, Protocol, is_typeddict

from gather import DOCS, renew
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

NAME = """\
{title}
{line}

.. currentmodule:: {module}

.. {directive}:: {name}
{more}"""
MODULE = """\
{title}
{line}

{docstring}

{list}

.. toctree::
   :hidden:

   {pages}
"""

GROUPS = {
    "Transformations": (
        "clip_by_global_norm", "clip_by_norm", "clip_by_value", "clip_by_group_norm",
        "clip_by_average_norm", "clip_by_rms", "clip_by_spectral_norm",
        "clip_by_singular_value", "clip_by",
    ),
    "Functions without an optimizer": ("functional",),
    "Published methods": ("recipes",),
    "Wrappers of optimizers": (
        "skip", "with_error_feedback", "with_periodic_reset", "clip_before",
        "clip_after",
    ),
    "Masks, scopes, thresholds and responses": (
        "by_path", "axes", "units", "groups", "matrices", "singular_values", "scopes",
        "norms", "thresholds", "responses",
    ),
    "Monitoring and plots": ("metrics", "summary", "suggest", "Suggestion", "plot"),
    "Per-example gradients": ("per_example",),
    "Backward pass": ("clip_cotangent", "with_clipped_cotangent", "cotangent_probe"),
    "Attention": ("clip_attention_logits", "find_heads", "Heads"),
    "Types": ("typing",),
}  # fmt: skip
INDEX = """\
API reference
=============

Each public name has a page made from its docstring. In Python the same text is
``help(optclip.clip_by)``.

{list}

.. toctree::
   :hidden:

   {pages}
"""


def modules() -> list[ModuleType]:
    """`optclip` and the modules that its `__all__` names."""
    top = importlib.import_module("optclip")
    below = [getattr(top, name) for name in top.__all__]
    return [top, *filter(inspect.ismodule, below)]


def names(module: ModuleType) -> list[str]:
    """The names in `__all__` without modules, by purpose or by kind and alphabet."""
    public_names = module.__all__
    if module.__name__ == "optclip":
        # A name without a group raises here.
        purposes = [name for group in GROUPS.values() for name in group]
        public_names = sorted(public_names, key=purposes.index)
    found = [n for n in public_names if not inspect.ismodule(getattr(module, n))]
    if module.__name__ == "optclip":
        return found
    order = ("function", "class", "data")
    return sorted(found, key=lambda n: (order.index(kind(module, n)), n.lower()))


def public() -> dict[str, str]:
    """The page of every public name, in full.

    Some file systems take `Drop`, the class, and `drop` for one name.
    """
    found = {}
    for module in modules():
        found[module.__name__] = f"api/{module.__name__}"
        for name in names(module):
            end = "-class" if kind(module, name) == "class" else ""
            full = f"{module.__name__}.{name}"
            found[full] = f"api/{full}{end}"
    return found


def kind(module: ModuleType, name: str) -> str:
    """What autodoc calls it."""
    value = getattr(module, name)
    if inspect.isclass(value) and name not in described_below(module):
        return "class"
    return "function" if inspect.isroutine(value) else "data"


def page(module: ModuleType, name: str) -> str:
    """The page of one name."""
    title, value = f"{module.__name__}.{name}", getattr(module, name)
    directive, more = f"auto{kind(module, name)}", ""
    if kind(module, name) == "class" and not issubclass(value, tuple):
        # Fields of a named tuple are in its docstring, and have none that says more.
        more = "   :members:\n"
        # A protocol is made by nobody; its signature would be that of any.
        name += "()" if is_protocol(value) else ""
        # Nor do the keys of a dict of options, which are all that it has.
        more += "   :undoc-members:\n" if is_typeddict(value) else ""
    elif name in described_below(module):
        directive, more = "py:data", f"\n   {described_below(module)[name]}\n"
    elif kind(module, name) == "data":
        directive, more = "py:data", _constant(module, value)
    return NAME.format(
        title=title, line="=" * len(title), module=module.__name__, name=name,
        directive=directive, more=more,
    )  # fmt: skip


def is_protocol(value: type) -> bool:
    """Whether it says what others must have."""
    return Protocol in value.__bases__


def module_page(module: ModuleType) -> str:
    """The page of a module: its docstring, and its names with their first lines."""
    title, homes = module.__name__, public()
    rows, links = [], []
    for name in names(module):
        below = described_below(module)
        first = below.get(name) or _first(getattr(module, name))
        if name not in below and kind(module, name) == "data":
            first = f"``{getattr(module, name)!r}``. {first}"
        link = f"{name} </{homes[f'{title}.{name}']}>"
        rows.append(f":doc:`{link}`\n   {first}\n")
        links.append(link)
    return MODULE.format(
        title=title, line="=" * len(title), docstring=_automodule(module),
        list="\n".join(rows), pages="\n   ".join(links),
    )  # fmt: skip


def pages() -> dict[pathlib.Path, str]:
    """All pages by their path."""
    homes, made = public(), {DOCS / "api" / "index.rst": index_page()}
    for module in modules():
        made[DOCS / f"{homes[module.__name__]}.rst"] = module_page(module)
        for name in names(module):
            home = homes[f"{module.__name__}.{name}"]
            made[DOCS / f"{home}.rst"] = page(module, name)
    return made


def index_page() -> str:
    """List public names and modules by purpose, each with its first paragraph."""
    top, homes, lines = importlib.import_module("optclip"), public(), []
    for title, group in GROUPS.items():
        lines += [title, "-" * len(title), ""]
        for name in group:
            full = f"optclip.{name}"
            lines += [
                f":doc:`{full} </{homes[full]}>`",
                f"   {_first(getattr(top, name))}",
                "",
            ]
    pages = "\n   ".join(module.__name__ for module in modules())
    return INDEX.format(list="\n".join(lines), pages=pages)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before anything is read; check them after."""
    renew(pages())
    app.connect("autodoc-process-docstring", without_index, priority=400)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}


def without_index(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Delete the index from the docstring of `optclip`; its page has a list."""
    if what == "module" and "Index::" in lines:
        start = lines.index("Index::")
        texts = (i for i in range(start + 1, len(lines)) if lines[i][:1].strip())
        del lines[start : next(texts)]


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Each public name is described, on a page of its own."""
    described = env.domains.python_domain.objects
    for name, home in public().items():
        found: Any = described.get(name)
        if found is None or found.docname != home:
            warn = logging.getLogger(__name__).warning
            warn(f"the public name {name} has no page of its own")


def described_below(module: ModuleType) -> dict[str, str]:
    """What strings below type aliases say, which have no docstring."""
    if module.__name__ != "optclip.typing":
        return {}
    found = ModuleAnalyzer.for_module("optclip._typing._aliases").find_attr_docs()
    return {
        name: " ".join(" ".join(lines).split())
        for (owner, name), lines in found.items()
        if not owner and name in module.__all__
    }


def _constant(module: ModuleType, value: object) -> str:
    """The value, and what kind of thing it is."""
    own = type(value).__name__
    text = inspect.getdoc(value) or ""
    if own in module.__all__:
        text = f"An instance of `{own}`. {_first(value)}"
    return f"   :value: {value!r}\n\n" + textwrap.indent(text, "   ") + "\n"


def _first(value: object) -> str:
    """The first paragraph of its docstring."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _automodule(module: ModuleType) -> str:
    return f".. automodule:: {module.__name__}\n   :no-members:"
