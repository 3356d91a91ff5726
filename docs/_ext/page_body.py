"""The HTML of a page, as other extensions change it before it is written."""

from collections.abc import Callable
from typing import Any

from sphinx.application import Sphinx


def change(
    app: Sphinx, function: Callable[[str], str], *, below: str = "", priority: int = 500
) -> dict[str, bool]:
    """Apply a function to the body of each page below a folder; return the metadata."""

    def changed(
        app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
    ) -> None:
        if page.startswith(below) and "body" in context:
            context["body"] = function(context["body"])

    app.connect("html-page-context", changed, priority=priority)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
