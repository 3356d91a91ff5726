"""What a function returns is told in a sentence, whose colon ends no type.

Napoleon reads `Returns: A transformation: its state is ...` as a type and what it is.
"""

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Come before Napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", without_type, priority=400)
    return {"parallel_read_safe": True}


def without_type(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Put an empty type before the sentence."""
    for i, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:":
            text = lines[i + 1]
            indent = len(text) - len(text.lstrip())
            lines[i + 1] = f"{text[:indent]}: {text[indent:]}"
