"""The repository keeps its promises: public names, one tree, one version, no machine paths."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import normal_guidance

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "normal_guidance"
README = ROOT / "README.md"


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


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(["lightning", "pydicom", "nibabel", "highdicom"])
import normal_guidance.clinic.results.result_folder, normal_guidance.clinic.viewer.images  # features have no pixels
from normal_guidance import *
import normal_guidance
assert "GuidanceCallback" not in dir(normal_guidance)
print(Bags.__name__)
normal_guidance.GuidanceCallback
"""


def test_without_extras_features_are_predicted_and_the_callback_says_how_to_install_lightning():
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert run.stdout == "Bags\n"
    said = "UserError: GuidanceCallback needs lightning; pip install 'normal-guidance[lightning]'"
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
    heavy = ["torch", "numpy", "pandas", "sklearn", "matplotlib", "transformers", "pynetdicom"]
    code = (
        "import sys; from normal_guidance.cli.commands import app; "
        f"app(['experiment', '--help'], standalone_mode=False); print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--guidance-weight" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


def test_contributing_prints_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.partition("\nsrc/normal_guidance/\n")[2].partition("\ntests/")[0]
    real = {folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and any(folder.glob("*.py"))}
    assert {name for name, _ in re.findall(r"^  (\w+)/ +(\S.*)$", tree, re.MULTILINE)} == real


README_WORDS = 650


def test_the_readme_is_short():
    """What does not fit there has a page of its own in docs/."""
    text = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"))  # nobody reads comments there
    assert len(text.split()) <= README_WORDS
    assert text.index("```") < 250, "the first code stands on the first screen"


# Put together here, so that this file does not hold them.
MACHINE_PATHS = re.compile(
    "|".join(rf"(?<![\w.~-])/{name}/" for name in ("work", "root", "farm")) + "|/opt/" + "wheels"
)


def test_nothing_tracked_names_a_machine():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    # Files that are not ignored count as tracked: they will be.
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert files
    texts = {file: file.read_bytes().decode("latin-1") for file in files if file.is_file()}
    assert [file for file, text in texts.items() if MACHINE_PATHS.search(text)] == []


def test_the_path_guard_can_fail():
    assert MACHINE_PATHS.findall("see /" + "work/main") == ["/" + "work/"]
    assert MACHINE_PATHS.search("pip --find-links=/opt/" + "wheels")
    assert not MACHINE_PATHS.search("docs/" + "work/flow.md and https://example.org/" + "root/x")


def lost_tests(text: str) -> list[str]:
    """The files of tests, and the tests in backticks, that a document cites and that do not exist."""
    files = [file for file in re.findall(r"tests/(?:\w+/)*test_\w+\.py", text) if not (ROOT / file).is_file()]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return files + sorted({*re.findall(r"`(test_\w+)`", text)} - {*re.findall(r"^def (test_\w+)", code, re.MULTILINE)})


def test_the_tests_that_documents_cite_exist():
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    assert lost_tests("\n".join(texts)) == []
    cited = "`test_the_path_guard_can_fail`, `test_gone` and [a file](../tests/core/test_gone.py), tests/test_house.py"
    assert lost_tests(cited) == ["tests/core/test_gone.py", "test_gone"]


def test_words_of_the_glossary_are_in_alphabetical_order():
    """Sorted as small letters without punctuation; one row a word."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| \S", page, re.MULTILINE)
    words = [re.sub(r"[^a-z ]", "", word.lower()) for word in rows]
    assert len(words) == page.count("\n| **") > 60
    assert words == sorted(set(words))
