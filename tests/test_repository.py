"""The repository keeps its promises: import direction, one tree, one version, no machine paths."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normal_guidance
from documents import fenced_blocks

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "normal_guidance"
README = ROOT / "README.md"

# ----------------------------------------------------------------------------------------------------
# Imports point one way
# ----------------------------------------------------------------------------------------------------

# A package may import from itself and from the rows above its own; names in one row are siblings and may not.
LAYERS = (
    ("errors", "lazy_names"),
    ("extras", "seals", "typed_json"),
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
# `import normal_guidance as ng` is the one way in for people: beside the mathematics and training it offers stores
# (features), fit and predict (clinical) and figures (reports), all of them loaded at first use.
TOP_LEVEL_MAY_IMPORT = {"errors", "extras", "lazy_names", "core", "export"}
TOP_LEVEL_MAY_IMPORT |= {"features", "training", "clinical", "reports"}
# The packages whose third-party imports are limited, and to what (beside the standard library); triton comes with
# torch, on CUDA alone, and only modules named *_triton import it.
THIRD_PARTY = {"errors": set(), "extras": set(), "lazy_names": set(), "core": {"torch", "jaxtyping", "triton"}}


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
        ("core/a.py", "from normal_guidance.scans.index import bags", "core/a.py:1: core may not import data"),
        ("core/a.py", "def f():\n    import normal_guidance.cli", "core/a.py:2: core may not import cli"),
        ("core/a.py", "from ..data.bags import Bags", "core/a.py:1: core may not import data"),
        ("core/deep/a.py", "from ...data import bags", "core/deep/a.py:1: core may not import data"),
        ("core/__init__.py", "from .. import data", "core/__init__.py:1: core may not import data"),
        ("core/a.py", "import numpy as np", "core/a.py:1: core may not import numpy"),
        ("errors.py", "import torch", "errors.py:1: errors may not import torch"),
        ("reports/a.py", "from normal_guidance.clinic.viewer import x", "reports/a.py:1: reports may not"),
        ("data/a.py", "from normal_guidance import Bags", "data/a.py:1: import 'Bags' from the module"),
        ("__init__.py", "from normal_guidance.study import f", "__init__.py:1: the top-level module"),
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
        ("core/a.py", "from normal_guidance.base.errors import UserError\nfrom ..errors import UserError"),
        ("training/a.py", "import numpy\nfrom ..features.store import Store\nfrom .config import Config"),
        ("cli/commands.py", "from normal_guidance import __version__\nfrom ..reports import html"),
        ("__init__.py", "from .core.guidance import NormalGuidance\nfrom normal_guidance.sweep import sweep"),
    ],
)
def test_the_import_guard_lets_good_code_pass(tmp_path, file, code):
    path = tmp_path / "normal_guidance" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert import_violations(tmp_path / "normal_guidance") == []


def test_every_public_name_exists():
    """The top level loads its names lazily, from strings that no parser of imports sees."""
    for name in normal_guidance.__all__:
        value = getattr(normal_guidance, name)
        origin = getattr(value, "__module__", None) or getattr(value, "__name__", "normal_guidance.core")
        assert origin.split(".")[:1] == ["normal_guidance"], name
        assert origin.split(".")[1] in TOP_LEVEL_MAY_IMPORT, name


def names_for_type_checkers(file: Path) -> set[str]:
    """The names that a file imports under ``if TYPE_CHECKING:``."""
    found = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    (block,) = (node for node in found if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {alias.name for line in block.body for alias in line.names}


@pytest.mark.parametrize("package", ["normal_guidance", "normal_guidance.clinic", "normal_guidance.study.figures"])
def test_lazy_names_are_the_same_for_people_tools_and_type_checkers(package):
    module = importlib.import_module(package)
    names = sorted(module.__all__)
    assert dir(module) == names
    assert names_for_type_checkers(Path(module.__file__)) == set(names)
    assert all(getattr(module, name) is not None for name in names)


WITHOUT_LIGHTNING = """
import sys
sys.modules["lightning"] = None
from normal_guidance import *
import normal_guidance
assert "GuidanceCallback" not in dir(normal_guidance)
print(Bags.__name__)
normal_guidance.GuidanceCallback
"""


def test_without_lightning_all_other_names_are_imported_and_the_callback_says_how_to_install_it():
    run = subprocess.run([sys.executable, "-c", WITHOUT_LIGHTNING], capture_output=True, text=True)
    assert run.stdout == "Bags\n"
    said = "UserError: GuidanceCallback needs lightning; install it: pip install 'normal-guidance[lightning]'"
    assert run.stderr.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("NormalGuidence", "did you mean 'NormalGuidance'?"),
        ("buildModel", "did you mean 'build_model'?"),
        ("Slicefinder", "did you mean 'SliceFinder'?"),
        ("xyz", "it has Bag, Bags, Config"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(wrong, hint):
    with pytest.raises(
        AttributeError, match=rf"module 'normal_guidance' has no attribute '{wrong}'; {re.escape(hint)}"
    ):
        getattr(normal_guidance, wrong)
    assert not hasattr(normal_guidance, "__path_of_nothing__")


def test_the_command_line_starts_without_heavy_imports():
    heavy = ["torch", "numpy", "pandas", "sklearn", "matplotlib", "transformers"]
    code = f"import sys, normal_guidance.cli.commands; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ----------------------------------------------------------------------------------------------------
# A short README, and the tree in CONTRIBUTING.md
# ----------------------------------------------------------------------------------------------------


README_WORDS = 700


def test_the_readme_is_short():
    """What does not fit there has a page of its own in docs/."""
    text = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"))  # nobody reads comments there
    assert len(text.split()) <= README_WORDS
    assert text.index("```") < 250, "the first code stands on the first screen"


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


def test_contributing_prints_the_tree():
    folders = tree_folders((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert folders, "CONTRIBUTING.md has no fenced block with the tree under src/normal_guidance/"
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
