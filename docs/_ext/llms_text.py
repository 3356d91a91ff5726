"""The site as text for language models: `llms.txt`, and all pages in `llms-full.txt`.

`llms.txt` follows https://llmstxt.org: a title, a summary, and links with descriptions.
They lead to pages in Markdown, whose addresses are those of the pages with `.md`
appended. A page of the API is the docstrings of its names.
"""

import functools
import importlib
import inspect
import json
import pathlib
import re
import urllib.parse
from collections.abc import Iterator

from page_head import description
from sphinx import addnodes
from sphinx.application import Sphinx

LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+?)\.(?:md|ipynb)(#[\w-]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
NOT_TEXT = re.compile(
    r"^```\{toctree\}\n.*?^```\n|^</?div.*\n|^---\n.*?^---\n", re.MULTILINE | re.DOTALL
)
SUMMARY = """\
# optclip

> {summary}

optclip {version}. All pages are in one file: [llms-full.txt]({base}llms-full.txt).
"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the files after the pages."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(app: Sphinx, error: Exception | None) -> None:
    """Write both files, and each page in Markdown, in the order of the contents."""
    if error or app.builder.format != "html":
        return
    base = app.config.html_baseurl
    out = pathlib.Path(app.outdir)
    about = description(app.env.get_doctree(app.config.root_doc))
    index = SUMMARY.format(summary=about, version=app.config.version, base=base)
    texts = []
    for caption, pages in sections(app):
        index += f"\n## {caption}\n\n"
        for page in pages:
            text = page_text(app, page)
            path = out / f"{app.builder.get_target_uri(page)}.md"
            path.write_text(text)
            texts.append(text)
            title = app.env.titles[page].astext()
            about = description(app.env.get_doctree(page))
            link = f"{base}{app.builder.get_target_uri(page)}.md"
            index += f"- [{title}]({link})" + (f": {about}\n" if about else "\n")
    (out / "llms.txt").write_text(index)
    (out / "llms-full.txt").write_text("\n\n".join(texts))


def sections(app: Sphinx) -> Iterator[tuple[str, list[str]]]:
    """Yield the captions of the table of contents, and their pages."""
    root = app.config.root_doc
    first = [root]
    for tree in app.env.get_doctree(root).findall(addnodes.toctree):
        pages = []
        for page in tree["includefiles"]:
            pages += [page, *modules(app, page)]
        yield tree["caption"], first + pages
        first = []


def modules(app: Sphinx, page: str) -> list[str]:
    """Return the pages of the modules, if this page lists them."""
    return app.env.toctree_includes.get(page, []) if page == "api/index" else []


def page_text(app: Sphinx, page: str) -> str:
    """Return a page in Markdown."""
    if page.startswith("api/optclip"):
        return module_text(app, page.removeprefix("api/"))
    path = app.env.doc2path(page)
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = notebook_text(text)
    elif path.suffix == ".rst":
        title = app.env.titles[page].astext()
        return f"# {title}\n\n{description(app.env.get_doctree(page))}\n"
    if "/" not in page:
        # Links of a page that is no copy are relative to the repository.
        source = [text]
        app.emit("source-read", page, source)
        text = source[0]
    text = IMAGE.sub(r"Figure: \1", NOT_TEXT.sub("", text))
    target = functools.partial(followed, f"{app.config.html_baseurl}{page}")
    return LINK.sub(target, text).strip() + "\n"


def followed(page: str, link: re.Match[str]) -> str:
    """Return a link of a page, relative to the folder of the site."""
    target = urllib.parse.urljoin(page, link[2])
    return f"[{link[1]}]({target}.html{link[3] or ''})"


def notebook_text(source: str) -> str:
    """Return the text, the code and the printed outputs of a notebook."""
    parts = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text:
            parts.append(f"```python\n{text}\n```")
        printed = "".join(map(printed_text, cell.get("outputs", ())))
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)


def printed_text(output: dict) -> str:
    """Return the text of an output, none if it is a plot."""
    data = output.get("data", {})
    text = [] if "image/png" in data else data.get("text/plain", [])
    return "".join(output.get("text", text))


def module_text(app: Sphinx, name: str) -> str:
    """Return the docstrings of a module and of the names that it exports."""
    module = importlib.import_module(name)
    parts = [f"# {name}\n\n{inspect.getdoc(module)}"]
    for each in module.__all__:
        value = getattr(module, each)
        if inspect.isroutine(value) or inspect.isclass(value):
            parts.append(f"## {name}.{each}")
            parts.append(f"```python\n{each}{signature(value)}\n```")
            parts.append(inspect.getdoc(value) or "")
    return "\n\n".join(parts) + "\n"


def signature(value: object) -> str:
    """Return the parameters of a function or class, if it has any."""
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
