"""The head of each page: its title, description, and tags of links to it.

The description is the first paragraph. Tags that need an absolute address are written
if the site has one (`html_baseurl`).
"""

import html
import re
import textwrap
import urllib.parse
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 160  # Characters of a description that search engines show.
CARD = "_static/card.png"
NO_TEXT = (nodes.entry, nodes.caption, nodes.legend, nodes.field)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the tags to each page before it is written."""
    app.connect("html-page-context", add_tags)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_tags(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Add the description and the tags of Open Graph, and name the landing page."""
    if doctree is None:
        return
    if page == app.config.root_doc:
        context["title"] = "Gradient clipping for JAX"
    title = re.sub("<[^>]+>", "", context["title"])
    tags = {
        "og:site_name": app.config.project,
        "og:type": "website",
        "og:title": html.unescape(title),
        "og:description": description(doctree),
    }
    base = app.config.html_baseurl
    if base:
        tags["og:url"] = urllib.parse.urljoin(base, app.builder.get_target_uri(page))
        tags["og:image"] = urllib.parse.urljoin(base, CARD)
    lines = [
        tag("name", "description", tags["og:description"]),
        tag("name", "twitter:card", "summary_large_image"),
    ]
    lines += [tag("property", key, value) for key, value in tags.items()]
    context["metatags"] += "\n".join(lines)


def tag(kind: str, key: str, value: str) -> str:
    """Return a tag of the head."""
    return f'<meta {kind}="{key}" content="{html.escape(value, quote=True)}" />'


def description(doctree: nodes.document) -> str:
    """Return the sentences of the first paragraph, as many as are short enough."""
    text = next(filter(None, map(words, doctree.findall(nodes.paragraph))), "")
    sentences = re.findall(r".+?[.:](?= |$)|.+$", text)
    if not sentences:
        return ""
    # The last sentence may introduce code, which the description does not have.
    if len(sentences) > 1 and sentences[-1].endswith(":"):
        del sentences[-1]
    while len(sentences) > 1 and len("".join(sentences)) > LONGEST:
        del sentences[-1]
    short = textwrap.shorten("".join(sentences), LONGEST, placeholder=" …")
    return re.sub(r":$", ".", short)


def words(paragraph: nodes.paragraph) -> str:
    """Return the text of a paragraph in one line; none for part of a table or list."""
    parents = []
    parent = paragraph.parent
    while parent is not None:
        parents.append(parent)
        parent = parent.parent
    if any(isinstance(each, NO_TEXT) for each in parents):
        return ""
    return " ".join(paragraph.astext().split())
