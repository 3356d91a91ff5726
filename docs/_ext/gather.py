"""Pages of the site for files outside `docs`: notebooks, examples, the changelog.

They are copied at each build into folders that git ignores. All links are written for
the repository, relative to the file they are in, and work there; on the site the same
link leads to the page made of its target, from a copy too.
"""

import os
import pathlib
import re

from sphinx.application import Sphinx

DOCS = pathlib.Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\(([\w./-]+\.(?:md|ipynb|py|cff|png))(?=[#)])")
PROMISES = "tests/README.md"
# The sidebar shows these below the page, when it is open.
BELOW = {
    "CONTRIBUTING.md": [
        "promises",
        "changelog",
        "agents",
        "code_of_conduct",
        "security",
    ],
    "notebooks/README.md": ["0*", "1*"],
}
EXAMPLE = """\
---
orphan: true
---

# {name}.py

Run it in a checkout, or [download](../../examples/{name}.py) it.

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy, and follow links in pages."""
    copies = {}
    # The README repeats the landing page and the quickstart.
    names = ["AGENTS", "CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY"]
    top = [*(f"{name}.md" for name in names), PROMISES, "notebooks/README.md"]
    pages = [ROOT / name for name in top]
    pages += ROOT.glob("notebooks/*.ipynb")
    for path in pages:
        name = path.relative_to(ROOT).as_posix()
        text = follow(path.read_text(), name)
        if name in BELOW:
            lines = ["```{toctree}", ":hidden:", ":glob:", *BELOW[name], "```"]
            text += "\n" + "\n".join(lines) + "\n"
        copies[DOCS / place(name)] = text
    for path in ROOT.glob("examples/*.py"):
        name = path.relative_to(ROOT).as_posix()
        copies[DOCS / place(name)] = EXAMPLE.format(name=path.stem)
    renew(copies)
    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def renew(wanted: dict[pathlib.Path, str]) -> None:
    """Write what has changed, so that Sphinx reads no page anew for nothing."""
    for folder in {path.parent for path in wanted}:
        folder.mkdir(exist_ok=True)
        for old in set(folder.glob("*.*")) - set(wanted):
            old.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def place(name: str) -> str:
    """Where in `docs` the page of a file of the repository is."""
    path = pathlib.PurePosixPath(name)
    if name == PROMISES:
        return "project/promises.md"
    if path.parent.name == "examples":
        return f"examples/{path.stem}.md"
    if str(path.parent) == "." and path.suffix == ".md":
        return f"project/{path.name.lower()}"
    if path.parts[0] in ("docs", "notebooks"):
        return name.removeprefix("docs/")
    return f"../{name}"


def follow(text: str, name: str) -> str:
    """The text of a file of the repository, its links as on the site."""

    def new(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(name), link[1]))
        here = os.path.dirname(place(name))
        return f"]({os.path.relpath(place(target), here or '.')}"

    return LINK.sub(new, text)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Follow the links of a page that is not a copy."""
    if "/" not in docname:
        source[0] = follow(source[0], f"docs/{docname}.md")
