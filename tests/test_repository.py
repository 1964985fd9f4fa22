"""The repository keeps its promises: import direction, documents that run, one version, no machine paths."""

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import normal_guidance

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "normal_guidance"
README = ROOT / "README.md"

# ----------------------------------------------------------------------------------------------------
# Imports point one way
# ----------------------------------------------------------------------------------------------------

# A package may import from itself and from the rows above its own; names in one row are siblings and may not.
LAYERS = (
    ("errors",),
    ("seals", "typed_json"),
    ("files",),
    ("folders", "machine", "quantities", "ray_cluster", "source_version", "tensor_files", "tracking"),
    ("core",),
    ("export", "statistics"),
    ("data", "presentation"),
    ("features", "simulate"),
    ("training",),
    ("evaluation",),
    ("clinical", "reports", "viewer"),
    ("node",),
    ("cli",),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
TOP_LEVEL_MAY_IMPORT = {"errors", "core", "data", "export", "training"}
# The packages whose third-party imports are limited, and to what (beside the standard library); triton comes with
# torch, on CUDA alone, and only modules named *_triton import it.
THIRD_PARTY = {"errors": set(), "core": {"torch", "jaxtyping", "triton"}}


def imported_names(file: Path, module: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a file imports, inside functions too.

    ``from a import b`` yields ``a.b``, because b may be a module.
    """
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                source = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [source])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def why_forbidden(importer: str, name: str, package: str) -> str | None:
    """The reason why the sub-package ``importer`` ("" is the top-level module) may not import ``name``."""
    top, _, rest = name.partition(".")
    if top != package:
        allowed = THIRD_PARTY.get(importer)
        if allowed is not None and top not in allowed and top not in sys.stdlib_module_names:
            return f"{importer} may not import {top}"
        return None
    target = rest.partition(".")[0]
    if re.fullmatch(r"__\w+__", target):  # __version__
        return None
    if target not in RANK:
        return f"import {target or package!r} from the module that defines it"
    if importer == "":
        return None if target in TOP_LEVEL_MAY_IMPORT else f"the top-level module may not import {target}"
    if target == importer or RANK[target] < RANK[importer]:
        return None
    return f"{importer} may not import {target}"


def import_violations(package_dir: Path) -> list[str]:
    """Every import under ``package_dir`` that points the wrong way, as "file:line: reason"."""
    violations = []
    for file in sorted(package_dir.rglob("*.py")):
        relative = file.relative_to(package_dir)
        parts = [package_dir.name, *relative.with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        importer = "" if relative == Path("__init__.py") else parts[1]
        if importer and importer not in RANK:
            violations.append(f"{relative}: {importer} has no place in LAYERS (tests/test_repository.py)")
            continue
        for line, name in imported_names(file, module):
            reason = why_forbidden(importer, name, package_dir.name)
            if reason:
                violations.append(f"{relative}:{line}: {reason}")
    return violations


def test_imports_point_one_way():
    assert import_violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("core/a.py", "from normal_guidance.data import bags", "core/a.py:1: core may not import data"),
        ("core/a.py", "def f():\n    import normal_guidance.cli", "core/a.py:2: core may not import cli"),
        ("core/a.py", "from ..data.bags import Bags", "core/a.py:1: core may not import data"),
        ("core/deep/a.py", "from ...data import bags", "core/deep/a.py:1: core may not import data"),
        ("core/__init__.py", "from .. import data", "core/__init__.py:1: core may not import data"),
        ("core/a.py", "import numpy as np", "core/a.py:1: core may not import numpy"),
        ("errors.py", "import torch", "errors.py:1: errors may not import torch"),
        ("reports/a.py", "from normal_guidance.viewer import x", "reports/a.py:1: reports may not"),
        ("data/a.py", "from normal_guidance import Bags", "data/a.py:1: import 'Bags' from the module"),
        ("__init__.py", "from normal_guidance.evaluation import f", "__init__.py:1: the top-level module"),
        ("__init__.py", "from .cli import app", "__init__.py:1: the top-level module may not import cli"),
        ("utils/a.py", "", "utils/a.py: utils has no place in LAYERS"),
    ],
)
def test_the_import_guard_can_fail(tmp_path, file, code, reason):
    path = tmp_path / "normal_guidance" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    (violation,) = import_violations(tmp_path / "normal_guidance")
    assert violation.startswith(reason)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/a.py", "import math, torch.nn.functional as F\nfrom jaxtyping import Float\nfrom . import b"),
        ("core/a.py", "from normal_guidance.errors import UserError\nfrom ..errors import UserError"),
        ("training/a.py", "import numpy\nfrom ..features.store import Store\nfrom .config import Config"),
        ("cli/commands.py", "from normal_guidance import __version__\nfrom ..reports import html"),
        ("__init__.py", "from .core.guidance import NormalGuidance\nfrom normal_guidance.data import bags"),
    ],
)
def test_the_import_guard_lets_good_code_pass(tmp_path, file, code):
    path = tmp_path / "normal_guidance" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert import_violations(tmp_path / "normal_guidance") == []


def test_every_public_name_exists():
    """The top level loads its names lazily, from strings that no parser of imports sees."""
    for name in getattr(normal_guidance, "__all__", ()):
        origin = getattr(getattr(normal_guidance, name), "__module__", None) or "normal_guidance.core"
        assert origin.split(".")[:1] == ["normal_guidance"], name
        assert origin.split(".")[1] in TOP_LEVEL_MAY_IMPORT, name


def test_the_command_line_starts_without_heavy_imports():
    heavy = ["torch", "numpy", "pandas", "sklearn", "matplotlib", "transformers"]
    code = f"import sys, normal_guidance.cli.commands; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ----------------------------------------------------------------------------------------------------
# Documents run
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced block of a Markdown file; ``line`` is that of its opening fence."""

    language: str
    line: int
    source: str
    not_run: str | None  # the reason in the comment <!-- not run: reason --> just above


def fenced_blocks(text: str) -> list[Block]:
    blocks, previous, lines = [], "", iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        opening = re.match(r"(\s*)(```+|~~~+)\s*([\w+-]*)", line)
        if opening:
            indent, fence, language = opening.groups()
            body = []
            for _, inner in lines:
                if inner.strip().startswith(fence) and not inner.strip().strip(fence[0]):
                    break
                body.append(inner.removeprefix(indent))
            reason = re.fullmatch(r"<!--\s*not run:\s*(.+?)\s*-->", previous.strip())
            blocks.append(Block(language, number, "\n".join(body) + "\n", reason and reason[1]))
            previous = ""
        elif line.strip():
            previous = line
    return blocks


def documents() -> list[Path]:
    return [README, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: Path, *languages: str) -> list[Block]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [block for block in fenced_blocks(text) if block.language in languages]


def run_blocks(path: Path, blocks: list[Block]) -> None:
    """Execute the blocks in one namespace; whatever fails is shown with the document's file and line."""
    namespace = {"__name__": "__main__"}
    for block in blocks:
        # Blank lines in front give the code the line numbers that it has in the document.
        try:
            exec(compile("\n" * block.line + block.source, str(path), "exec"), namespace)
        except Exception as error:
            line = block.line
            if isinstance(error, SyntaxError) and error.filename == str(path):
                line = error.lineno or line
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == str(path):
                    line = trace.tb_lineno
                trace = trace.tb_next
            code = path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
            pytest.fail(f"{path.name}:{line}: {code}\n{type(error).__name__}: {error}")


def document_cases() -> list:
    """One case per document, and one, skipped with its reason, per block that says it is not run."""
    cases = []
    for path in documents():
        name = path.relative_to(ROOT).as_posix()
        python = blocks_of(path, "python", "py")
        cases.append(pytest.param(path, [block for block in python if not block.not_run], id=name))
        for block in python:
            if block.not_run:
                mark = pytest.mark.skip(reason=f"{name}:{block.line} is not run: {block.not_run}")
                cases.append(pytest.param(path, [block], id=f"{name}:{block.line}", marks=mark))
    return cases


@pytest.mark.parametrize(("path", "blocks"), document_cases())
def test_documents_run(path, blocks, tmp_path, monkeypatch):
    assert path.exists(), f"{path.name} is missing"
    monkeypatch.chdir(tmp_path)
    run_blocks(path, blocks)


def test_a_broken_document_names_its_line(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\ny = x\ny.nothing\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page.md:11: y.nothing\nAttributeError"):
        run_blocks(path, blocks_of(path, "python"))


def test_blocks_are_found_with_language_line_and_reason():
    text = "a\n\n<!-- not run: needs a GPU -->\n\n```python\nf()\n```\n\n```\nplain\n```\n"
    assert fenced_blocks(text) == [
        Block("python", 5, "f()\n", "needs a GPU"),
        Block("", 9, "plain\n", None),
    ]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def shell_commands(path: Path) -> list[tuple[int, list[str]]]:
    """(line, words) of every simple command in the shell blocks, without prompts and environment."""
    commands = []
    for block in blocks_of(path, "bash", "console", "sh", "shell"):
        source = block.source.replace("\\\n", " ")  # a continued line is one command
        for offset, line in enumerate(source.splitlines(), start=1):
            if block.language == "console" and not line.startswith("$ "):
                continue  # output
            for part in re.split(r"&&|\|\||[;|]", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                while words and re.match(r"\w+=", words[0]):
                    words = words[1:]
                if words:
                    commands.append((block.line + offset, words))
    return commands


def why_unknown(words: list[str]) -> str | None:
    """What is wrong with a ``make`` or ``nguide`` command; other programs are not judged."""
    from typer.main import get_command

    from normal_guidance.cli import app

    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = [word for word in arguments if word[0] != "-" and "=" not in word]
        unknown = [word for word in targets if word not in make_targets()]
        return f"no make target {unknown[0]!r}" if unknown else None
    if program != "nguide":
        return None
    command = get_command(app)
    for word in arguments:
        if word.startswith("--"):
            options = {name for option in command.params for name in option.opts + option.secondary_opts}
            if word.partition("=")[0] not in options | {"--help"}:
                return f"nguide {command.name} has no option {word!r}"
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"no nguide command {word!r}"
            command = command.commands[word]
    return None


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_real_commands(path):
    assert path.exists(), f"{path.name} is missing"
    problems = [(line, why_unknown(words)) for line, words in shell_commands(path)]
    assert [f"{path.name}:{line}: {reason}" for line, reason in problems if reason] == []


def test_the_command_guard_can_fail(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "```bash\nCI=1 make test && make tset  # runs\nmake PYTHON=python3 install\n.venv/bin/nguide dmeo\n"
        "nguide --verison\nls\n```\n```console\n$ make help\nmake nothing\n$ nguide --version\n```\n"
    )
    reasons = [(line, why_unknown(words)) for line, words in shell_commands(path)]
    assert [reason for reason in reasons if reason[1]] == [
        (2, "no make target 'tset'"),
        (4, "no nguide command 'dmeo'"),
        (5, "nguide nguide has no option '--verison'"),
    ]


def tree_folders(text: str) -> dict[str, str]:
    """Folder -> description, from the fenced block that prints the tree under ``src/normal_guidance/``."""
    for block in fenced_blocks(text):
        lines = block.source.splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"[│├└─\s]*src/normal_guidance/", line)]
        if not starts:
            continue
        folders, depth = {}, None
        base = len(re.match(r"[│├└─\s]*", lines[starts[0]])[0])
        for line in lines[starts[0] + 1 :]:
            indent = len(re.match(r"[│├└─\s]*", line)[0])
            if line.strip() and indent <= base:
                break
            entry = re.match(r"(\w+)/\s*#?\s*(.*)", line[indent:])
            if entry and indent == (depth := depth or indent):
                folders[entry[1]] = entry[2].strip()
        return folders
    return {}


def test_readme_prints_the_tree():
    assert README.exists(), "README.md is missing"
    folders = tree_folders(README.read_text(encoding="utf-8"))
    assert folders, "README.md has no fenced block with the tree under src/normal_guidance/"
    real = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and any(folder.glob("*.py"))}
    assert set(folders) == real
    assert all(folders.values()), "every folder of the tree gets its line"


@pytest.mark.parametrize(
    "tree",
    [
        "src/normal_guidance/\n  core/  the mathematics\n    deep/  inside\n  data/  scans\ntests/  tests\n",
        "src/normal_guidance/\n├── core/  # the mathematics\n│   └── deep/  # x\n└── data/  # scans\n",
    ],
)
def test_the_tree_is_read(tree):
    assert tree_folders(f"# Title\n\n```\n{tree}```\n") == {"core": "the mathematics", "data": "scans"}


# ----------------------------------------------------------------------------------------------------
# Versions agree; nothing names a machine
# ----------------------------------------------------------------------------------------------------


def test_versions_agree():
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = re.search(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation is not None
    assert changes is not None
    assert citation[1] == changes[1] == normal_guidance.__version__


# Put together here, so that this file does not hold them.
MACHINE_PATHS = re.compile(
    "|".join(rf"(?<![\w.~-])/{name}/" for name in ("work", "root", "farm")) + "|/opt/" + "wheels"
)


def machine_paths(text: str) -> list[str]:
    return MACHINE_PATHS.findall(text)


def test_nothing_tracked_names_a_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    # Files that are not ignored count as tracked: they will be.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {paths[0]}"
        for file in files
        if file.is_file() and (paths := machine_paths(file.read_bytes().decode("latin-1")))
    ]
    assert found == []


def test_the_path_guard_can_fail():
    assert machine_paths("see /" + "work/main") == ["/" + "work/"]
    assert machine_paths("pip --find-links=/opt/" + "wheels")
    assert machine_paths("docs/" + "work/flow.md and https://example.org/" + "root/x") == []
