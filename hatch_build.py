"""Package metadata that depends on the address of the repository.

Set `OPTCLIP_REPOSITORY`, such as `https://github.com/owner/optclip`, and optionally
`OPTCLIP_DOCUMENTATION`, while building a release: `.github/workflows/release.yml` does.
The package page then has these addresses, and the links and the figure of the README,
which are relative to the repository, lead to the files of the released version.
"""

import os
import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# `[text](target)` and `![text](target)`, unless the target is absolute or an anchor.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute(readme: str, files: str, images: str) -> str:
    """Return the README with absolute links."""

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        return f"{image}[{text}]({images if image else files}/{target})"

    return LINK.sub(link, readme)


class Metadata(MetadataHookInterface):
    """Set the README and the addresses of the project."""

    def update(self, metadata: dict) -> None:
        """Set `readme` and `urls`, which `pyproject.toml` declares as dynamic."""
        readme = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("OPTCLIP_REPOSITORY", "").rstrip("/")
        documentation = os.environ.get("OPTCLIP_DOCUMENTATION", "").rstrip("/")
        urls = {}
        if repository:
            tag = f"v{metadata['version']}"
            files = f"{repository}/blob/{tag}"
            readme = absolute(readme, files, f"{repository}/raw/{tag}")
            urls = {
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{files}/CHANGELOG.md",
                "Security": f"{files}/SECURITY.md",
            }
        if documentation:
            urls["Documentation"] = documentation
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = urls
