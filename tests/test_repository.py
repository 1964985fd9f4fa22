"""The repository keeps its promises: public names, one tree, one version, no machine paths."""

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


def test_every_public_name_exists():
    """The top level loads its names lazily, from strings that no parser of imports sees."""
    for name in normal_guidance.__all__:
        value = getattr(normal_guidance, name)
        origin = getattr(value, "__module__", None) or getattr(value, "__name__", "normal_guidance.core")
        assert origin.split(".")[:1] == ["normal_guidance"], name


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


def test_help_answers_without_heavy_imports():
    heavy = ["torch", "numpy", "pandas", "sklearn", "matplotlib", "transformers"]
    code = (
        "import sys; from normal_guidance.cli.commands import app; "
        f"app(['experiment', '--help'], standalone_mode=False); print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--guidance-weight" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


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


def test_words_of_the_glossary_are_in_alphabetical_order():
    """Sorted as small letters without punctuation; one row a word."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| \S", page, re.MULTILINE)
    words = [re.sub(r"[^a-z ]", "", word.lower()) for word in rows]
    assert len(words) == page.count("\n| **") > 60
    assert words == sorted(set(words))
