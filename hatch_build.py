"""How the package is built: no wheel or sdist without the viewer's page, and a README whose links work on PyPI.

Hatchling calls both classes; pyproject.toml names them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGE = Path("src", "normal_guidance", "clinic", "viewer", "static")
REPOSITORY = "normal-guidance/normal-guidance"
LINK = re.compile(r"""(\]\(<?|\b(?:href|src|srcset)=["'])(?![a-z][a-z+.-]*:|#|//)([^)>"'\s]+)""")
"""The target of a Markdown or HTML link, unless it is absolute or within the page."""
PICTURE = re.compile(r"\.(?:gif|jpe?g|png|svg|webp)$")


class NeedsPage(BuildHookInterface):
    """Stop the build of a wheel or sdist that would lack the viewer's page; an editable install serves the clone's."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable" and (lacking := lacking_files(Path(self.root))):
            self.app.abort(
                f"The viewer's page is not built: {lacking[0].as_posix()} is missing, and the package would have no "
                f"page for `nguide view`. Build it in the clone with Node and npm, and build the package again:\n\n"
                f"    make viewer\n"
            )


class ReadmeForPyPI(MetadataHookInterface):
    """Give PyPI the README with links to the files of this version's tag."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        found = re.search(
            r'^__version__ = "(.+)"$', (root / "src/normal_guidance/__init__.py").read_text("utf-8"), re.MULTILINE
        )
        assert found is not None, "src/normal_guidance/__init__.py has no line __version__"
        text = absolute_links((root / "README.md").read_text("utf-8"), f"v{found[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def lacking_files(root: Path) -> list[Path]:
    """Return the files that the viewer's page needs and that are not there: index.html, and what it names."""
    index = root / PAGE / "index.html"
    if not index.is_file():
        return [PAGE / "index.html"]
    named = re.findall(r"""\b(?:href|src)=["']/?([\w.-]+\.\w+)["']""", index.read_text("utf-8"))
    return [PAGE / name for name in named if not (root / PAGE / name).is_file()]


def absolute_links(markdown: str, tag: str) -> str:
    """Return a page with the relative links of its text made absolute: files as GitHub shows them, pictures as files.

    Example:
        >>> absolute_links("![a](docs/a.png), [b](docs/b.md#c), [d](#d)", "v1")[:66]
        '![a](https://raw.githubusercontent.com/normal-guidance/normal-guid'
    """

    def absolute(link: re.Match[str]) -> str:
        opening, target = link[1], link[2].removeprefix("./")
        if PICTURE.search(target):
            return f"{opening}https://raw.githubusercontent.com/{REPOSITORY}/{tag}/{target}"
        return f"{opening}https://github.com/{REPOSITORY}/blob/{tag}/{target}"

    code = r"(^```.*?^```)"
    parts = re.split(code, markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)
