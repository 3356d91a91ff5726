"""Public names in backticks lead to their pages, in docstrings and in pages alike.

A name stands for itself in full (`optclip.clip_by`), by its module
(`thresholds.ema`), and in the pages of the API bare (`clip_by`): first one of the same
module, then one of `optclip`, then one of any. Calls count, `recipes.zclip(z=3.0)`,
and so does `help(optclip.skip)`. Text in the role `code` is typed, and is no link.
"""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry
from sphinx.util.nodes import make_refnode

CALL = re.compile(r"([\w.]+)(\(.*\))?", re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    """Link names as pages are written."""
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True}


def link(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Make each a link to the page of its name."""
    described = app.env.domains.python_domain.objects
    for node in list(document.findall(nodes.literal)):
        is_title = isinstance(node.parent, (nodes.reference, nodes.title))
        if is_title or "code" in node["classes"]:
            continue
        name = find(node.astext(), docname, described)
        if name and docname != described[name].docname:
            there = described[name].docname, described[name].node_id
            new = make_refnode(app.builder, docname, *there, node.deepcopy(), name)
            node.replace_self(new)


def find(text: str, docname: str, described: dict[str, ObjectEntry]) -> str | None:
    """The public name that a piece of code on this page means, in full."""
    called = CALL.fullmatch(re.sub(r"^help\((.*)\)$", r"\1", text))
    if not called:
        return None
    name = re.sub(r"^F\b", "optclip.functional", called[1])
    tried = [name]
    if "." in name:
        tried.append(f"optclip.{name}")
    elif docname.startswith("api/"):
        own = docname.removeprefix("api/")
        modules = sorted(
            n for n, found in described.items() if found.objtype == "module"
        )
        places = [own, own.rpartition(".")[0], *modules]
        tried += [f"{place}.{name}" for place in places]
    else:
        tried.append(f"optclip.recipes.{name}")
    return next((full for full in tried if full in described), None)
