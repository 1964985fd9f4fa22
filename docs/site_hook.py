"""What mkdocs does not do by itself: navigation by folder, pages made of root files, links, formulas, the command line.

mkdocs.yml names this file as a hook; `make docs` runs it.  Nothing that it makes is committed.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

log = get_plugin_logger("site_hook")

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "https://github.com/normal-guidance/normal-guidance"

ROOT_PAGES = {
    "LOG.md": "log.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
"""Files at the root that are shown as pages, and the page's name in docs/."""

ERRORS = "reference/errors.md"
"""The page of errors, which docs/errors_page.py makes: half a minute, in a process of its own, once in a build."""

BOOST = {
    **{"security.md": 10, "conformance.md": 4, "howto/node.md": 4, "howto/predict.md": 4},
    **{"log.md": 0.1, "changelog.md": 0.3, "results/appendix/": 0.3, "replication/": 0.3, ERRORS: 0.3},
}
"""How far ahead the search puts a page, or the pages of a folder; others have 1."""

COMMANDS_MARK = "<!-- the commands of nguide -->"
"""The line of a page that is replaced by the reference of every command."""

# ----------------------------------------------------------------------------------------------------
# Navigation
# ----------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(item: Any, docs: Path) -> list[Any]:
    """The entries of nav with every ``folder/*`` in them replaced by the folder's pages; an empty part is left out."""
    if isinstance(item, list):
        return [entry for part in item for entry in _expanded(part, docs)]
    if isinstance(item, str):
        return _pages(docs, docs / item.removesuffix("/*")) if item.endswith("/*") else [item]
    ((title, value),) = item.items()
    inner = _expanded(value, docs)
    return [{title: value if inner == [value] else inner}] if inner else []


def _pages(docs: Path, folder: Path) -> list[Any]:
    """All pages of a folder: its index, those that it links to in its order, the rest, folders in it."""
    pages = {path.name: path for path in sorted(folder.glob("*")) if path.suffix in (".md", ".ipynb")}
    index = pages.pop("index.md", None) or pages.pop("README.md", None)
    linked = re.findall(r"\]\(([\w.-]+)", index.read_text(encoding="utf-8")) if index else []
    ordered = dict.fromkeys([*(name for name in linked if name in pages), *pages])
    entries: list[Any] = [_relative(index, docs)] if index else []
    entries += [{nav_title(pages[name]): _relative(pages[name], docs)} for name in ordered]
    for inner in sorted(path for path in folder.glob("*") if path.is_dir()):
        below = _pages(docs, inner)
        entries += [{inner.name.capitalize(): below}] if below else []
    return entries


def _relative(path: Path, docs: Path) -> str:
    return path.relative_to(docs).with_suffix(".md").as_posix()  # a notebook becomes a page, too


def nav_title(path: Path) -> str:
    """A page's title as far as its first colon, or behind it where the part before is the folder's name."""
    title = re.search(r'(?:^|")# (.+?)(?:\\n|"|$)', path.read_text(encoding="utf-8"), re.MULTILINE)  # or of a notebook
    if title is None:
        return path.stem
    before, _, behind = title[1].replace("`", "").partition(": ")
    return behind[:1].upper() + behind[1:] if before.lower() == path.parent.name.lower() and behind else before


# ----------------------------------------------------------------------------------------------------
# Files at the root as pages, links to files outside docs/
# ----------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, ERRORS, content=errors()))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ROOT / "frontend/src/icon.svg")))
    return files


@cache
def errors() -> str:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "errors_page.py"], capture_output=True, text=True, check=False
    )
    if not made.stdout:
        log.warning(made.stderr)
    return made.stdout


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    if name == "log.md":
        page.meta["hide"] = ["toc"]  # its headings are sentences: the list would be as long as the page
    for place, boost in BOOST.items():
        if name.startswith(place):
            page.meta["search"] = {"boost": boost}
    source = {shown: root for root, shown in ROOT_PAGES.items()}.get(name, f"docs/{name}")
    known = {file.src_uri for file in files if not file.inclusion.is_excluded()}
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, command_reference())
    return as_python_markdown(site_links(markdown, source, name, known))


def site_links(markdown: str, source: str, page: str, known: set[str]) -> str:
    """Links of the file ``source`` as they must be on ``page``: both are paths from the root and from docs/.

    A link to what the site has leads there, one to any other file of the repository to its address at GitHub.  A link
    to nothing stays as it is, so that mkdocs reports it.
    """

    def changed(match: re.Match[str]) -> str:
        before, target, anchor = match.groups()
        path = os.path.normpath(PurePosixPath(source).parent / target)
        shown = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if shown in known:
            return before + os.path.relpath(shown, PurePosixPath(page).parent).replace(os.sep, "/") + (anchor or "")
        index = f"{shown}/README.md" if f"{shown}/README.md" in known else f"{shown}/index.md"
        if index in known:
            return before + os.path.relpath(index, PurePosixPath(page).parent).replace(os.sep, "/") + (anchor or "")
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        return f"{before}{SOURCE}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor or ''}"

    return _outside_code(r"(\]\(|^\[[^\]]+\]: |<img src=\")(?![a-z]+:|/|#)([^)\s#\"]+)(#[\w-]+)?", changed, markdown)


def _outside_code(pattern: str, change: Any, markdown: str) -> str:
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(pattern, change, part, flags=re.MULTILINE) for part in parts[::2]]
    return "".join(parts)


def as_python_markdown(markdown: str) -> str:
    """Lists as GitHub reads them: one may follow a paragraph or a table without a blank line."""
    lines: list[str] = []
    in_code = in_list = False
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        begins = not in_code and re.match(r"[-*+] |1\. ", line) is not None
        if begins and not in_list and lines and lines[-1].strip():
            lines.append("")
        if not line.strip() or line.lstrip().startswith("|"):
            in_list = False
        lines.append(line)
        in_list |= begins
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------
# Formulas
# ----------------------------------------------------------------------------------------------------

# What matplotlib's mathtext lacks, and what looks nearly the same there.
REPLACED = {
    r"\\t?frac\s*(\w)(\w)": r"\\frac{\1}{\2}",
    r"\\tfrac": r"\\frac",
    r"\\[Bb]ig+": "",
    r"\\(ge|le)\b": r"\\\1q",
    r"\\[lr]Vert": r"\\|",
    r"\\ldots|\\dots\b": r"\\ldots ",
    r"\s+": " ",
}


# matplotlib's codes of a path, and the letters of SVG.
SVG_WORDS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}


def on_page_content(content: str, page: Any, **_: Any) -> str:
    def drawn(match: re.Match[str]) -> str:
        tex = html.unescape(match[3])
        try:
            return formula_svg(tex, "block" if match[1] == "div" else "inline")
        except ValueError as error:
            log.warning(f"{page.file.src_uri}: the formula {tex!r} cannot be drawn: {error}")
            return match[0]

    return re.sub(r'<(div|span) class="arithmatex">(\\\[|\\\()\s*(.*?)\s*\\[\])]</\1>', drawn, content, flags=re.DOTALL)


def formula_svg(tex: str, display: str) -> str:
    """A formula as a drawing in the colour of the text; it needs no script and no font."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath, text_to_path

    plain = tex
    for pattern, instead in REPLACED.items():
        plain = re.sub(pattern, instead, plain)
    size, font = 16, FontProperties(family="DejaVu Serif", math_fontfamily="dejavuserif")
    scale = size / font.get_size_in_points()
    box = text_to_path.get_text_width_height_descent(f"${plain}$", font, ismath=True)
    width, height, depth = (scale * length for length in box)
    path = TextPath((0, 0), f"${plain}$", size=size, prop=font)
    drawing = "".join(
        SVG_WORDS[code] + " ".join(f"{x:.1f} {height - depth - y:.1f}" for x, y in points.reshape(-1, 2) if code != 79)
        for points, code in path.iter_segments()
    )
    width, height, depth = width + 2, height + 2, depth + 1  # a margin, so that no edge is cut
    style = f"width:{width / size:.2f}em;height:{height / size:.2f}em;vertical-align:{-depth / size:.2f}em"
    return (
        f'<svg class="formula-{display}" role="img" aria-label="{html.escape(tex)}" style="{style}" '
        f'viewBox="-1 -1 {width:.1f} {height:.1f}"><path d="{drawing}"/></svg>'
    )


# ----------------------------------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------------------------------


def command_reference() -> str:
    """Every command of nguide with its arguments and options, from the definitions that ``--help`` prints."""
    from typer.main import get_command

    from normal_guidance.cli.commands import app

    return "\n".join(_command_section(get_command(app), "nguide"))


def _command_section(command: Any, name: str) -> list[str]:
    inner = getattr(command, "commands", {})
    lines = [] if name == "nguide" else [f"\n## {name}\n", _plain(command.help or "")]
    rows = [_option_row(option) for option in command.params if not getattr(option, "hidden", False)]
    if rows and name != "nguide":
        lines += ["\n| argument or option | what it does |", "|---|---|", *rows]
    for word in inner:
        lines += _command_section(inner[word], f"{name} {word}")
    return lines


def _option_row(option: Any) -> str:
    is_option = option.opts[0].startswith("-")
    words = [*option.opts, *option.secondary_opts] if is_option else [option.metavar or option.name.upper()]
    names = ", ".join(f"`{word}`" for word in words)
    about = _plain(getattr(option, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    if option.required:
        about += " Required."
    elif isinstance(option.default, str | int | float) and option.default not in ("", False, True):
        about += f" Default: `{option.default}`."
    return f"| {names} | {about} |"


def _plain(text: str) -> str:
    """Help without the marks that colour it."""
    return re.sub(r"\[/?(?:bold|dim|red|green|yellow|cyan|blue|i|b)\]", "", text).replace("<", "&lt;").strip()
