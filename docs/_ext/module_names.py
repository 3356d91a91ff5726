"""The index of the API lists the names of each module that it links, if it has no rows.

Without them the search of a browser finds no pure function and no rule on that page.
"""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

INDEX = "api/index"
ROOT = "optclip"


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the names before the page is written."""
    app.connect("doctree-resolved", add_names)
    return {"parallel_read_safe": True}


def add_names(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Append links to the names of a module to the description of the module."""
    if docname != INDEX:
        return
    objects = app.env.domains.python_domain.objects
    shown = {node.get("reftitle") for node in document.findall(nodes.reference)}
    for row in document.findall(nodes.row):
        module = next(row.findall(nodes.reference), {}).get("reftitle")
        names = [
            name
            for name, entry in objects.items()
            if name.rpartition(".")[0] == module and entry.docname != docname
        ]
        if module == ROOT or not names or shown.intersection(names):
            continue
        links = nodes.paragraph(classes=["names"])
        for name in sorted(names):
            entry = objects[name]
            text = nodes.literal(text=name.rpartition(".")[2])
            there = entry.docname, entry.node_id
            links += make_refnode(app.builder, docname, *there, text, name)
            links += nodes.Text(" ")
        row.children[-1] += links
