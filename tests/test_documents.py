"""Every code block of README.md and docs/ runs: tutorials from top to bottom, pages, and what they name exists."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from documents import (
    PHOTOGRAPHED,
    PYTHON,
    ROOT,
    SHELL,
    TUTORIALS,
    Block,
    PageError,
    begins_with,
    blocks_of,
    difference,
    fenced_blocks,
    make_targets,
    run_page,
)
from normal_guidance.fit import fit_ensemble

README = ROOT / "README.md"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")

PREPARED = {
    "scans": "scans",
    "labels.csv": "scans/labels.csv",
    "new-scans": "new/scans",
    "index": "model.index",
    "store": "model.store",
    **{name: name for name in ("splits", "model", "out")},
}
"""What blocks of other pages may be given, and where the tutorial dicom-to-report has it."""


def documents() -> list[Path]:
    return [README, *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="session")
def ended(tmp_path_factory) -> Callable[[str], Path]:
    """The folder that a tutorial leaves; each is run once.  Nobody may change it."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            path, folder = TUTORIALS / f"{name}.md", tmp_path_factory.mktemp(name) / "folder"
            if before := begins_with(path):
                shutil.copytree(run(before), folder)
            else:
                folder.mkdir()
            folders[name] = folder
            run_page(path, folder)
        return folders[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tutorials_run(name, ended):
    """From top to bottom in one folder, with the outputs that the page shows, and its picture."""
    picture = ended(name) / PHOTOGRAPHED.get(name, f"{name}.png")
    text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    assert f"../images/tutorials/{name}.png" in text
    kept = ROOT / "docs" / "images" / "tutorials" / f"{name}.png"
    assert kept.stat().st_size < 150_000
    assert picture.exists(), "the tutorial makes its picture, or the page that it is of"
    assert all(block.not_run is None for block in blocks_of(TUTORIALS / f"{name}.md", *PYTHON, *SHELL))


def test_the_tutorials_are_listed():
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(([\w-]+)\.md\)", index)) == NAMES


PAGES = [path for path in documents() if path.parent != TUTORIALS]


@pytest.fixture
def few_steps(request, monkeypatch):
    """Without --slow a fit takes an eighth of its steps: two pages fit a model, which takes a minute each."""
    if not request.config.getoption("--slow"):
        monkeypatch.setattr(fit_ensemble, "STEPS", 1)  # the least number of epochs stays


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_documents_run(path, tmp_path):
    run_page(path, tmp_path, choose=lambda block: not block.given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in PAGES if any(block.given for block in blocks_of(path, *PYTHON, *SHELL))], ids=name_of
)
def test_commands_of_documents_run(path, tmp_path, ended):
    """Blocks that need scans, features or a model get those of a tutorial."""

    def prepared(name: str) -> Path:
        tutorial, _, file = name.rpartition(":")
        return ended(tutorial) / file if tutorial else ended("dicom-to-report") / PREPARED[file]

    run_page(path, tmp_path, prepared, choose=lambda block: bool(block.given))


def test_few_blocks_are_not_run():
    """Each says why, and names the test that runs the same."""
    skipped = {
        name_of(path): [block for block in blocks_of(path, *PYTHON, *SHELL) if block.not_run] for path in documents()
    }
    assert sum(map(len, skipped.values())) <= 33
    for name, blocks in skipped.items():
        for block in blocks:
            tests = re.findall(r"tests/[\w/]+(?:\.py)?", block.not_run)
            assert tests, f"{name}:{block.line} names no test that runs the same small"
            assert all((ROOT / test).exists() for test in tests), f"{name}:{block.line} names a test that is not there"


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "# Page\n\n```python\nx = 1\n```\n\ntext\n\n```python\ny = x\ny.nothing\n```\n",
            r"page.md:11: y.nothing\nAttr",
        ),
        ("```python\nx =\n```\n", "page.md:2: x =\nSyntaxError"),
        ("```bash\ntrue\nfalse\n```\n", "page.md:3: the shell block failed"),
        ("```bash\nfalse | true\n```\n", "page.md:2: the shell block failed"),
        ("```bash\necho $nothing\n```\n", "(?s)page.md:1: .*nothing: unbound variable"),
        ("```bash\necho 0.5\n```\n```text\n0.6\n```\n", "page.md:4: was not printed: 0.6"),
        ("```text\n0.6\n```\n", "page.md:1: no output before"),
        ("<!-- run given: gold -->\n```bash\ntrue\n```\n", "page.md:2: gold is not prepared"),
        ("<!-- run taken: gold -->\n```bash\ntrue\n```\n", "'taken' is none of given, small, instead"),
    ],
)
def test_a_broken_document_names_its_line(tmp_path, text, complaint):
    with pytest.raises(PageError, match=complaint):
        run_page(page(tmp_path, text), tmp_path)


def test_a_page_has_one_shell_and_one_namespace(tmp_path):
    """Folders, variables and background programs last to the end of the page, and not longer."""
    text = (
        "```bash\nmkdir inner; cd inner; x=7\nsleep 300 &\necho $! > ../pid\n```\n```python\ny = 1\n```\n"
        "```bash\npwd | sed 's#.*/##'; echo $x $(( 2 + 3 ))\nkill -0 $(cat ../pid)\n```\n```text\ninner\n7 5\n```\n"
        "```python\nprint(y + 1.5)\n```\n```text\n2.5\n```\n"
    )
    run_page(page(tmp_path, text), tmp_path)
    state = subprocess.run(["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()], capture_output=True, text=True)
    assert state.stdout.strip()[:1] in ("", "Z")  # gone, or ended and not yet fetched by the system


def test_a_block_is_given_copies_and_small_options(tmp_path):
    (tmp_path / "gold").write_text("old")
    text = (
        "<!-- run given: gold | small: methods --json | instead: lead=gold -->\n"
        "```bash\ncat lead; echo new > gold\nnguide methods\n```\n```text\nold[\n```\n"
    )
    run_page(page(tmp_path, text), tmp_path, prepared=lambda name: tmp_path / name)
    assert (tmp_path / "gold").read_text() == "old"


def test_blocks_are_found_with_language_line_and_reason():
    text = "a\n\n<!-- not run: needs a GPU -->\n\n```python\nf()\n```\n\n```\nplain\n```\n"
    assert fenced_blocks(text) == [Block("python", 5, "f()\n", "needs a GPU"), Block("", 9, "plain\n")]
    assert Block("bash", 1, "pip install x\nnguide demo\n").sets_up
    assert not Block("bash", 1, "nguide demo\n").sets_up


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("a\nb", "a\nb\nc", None),
        ("b", "a\nb", None),
        ("a\nc", "a\nb\nc", "c"),
        ("a\n...\nc", "a\nb\nc", None),
        ("b\na", "a\nb", "a"),
        ("AUROC 0.80 of 7", "AUROC 0.83 of 7", None),
        ("AUROC 0.80 of 7", "AUROC 0.90 of 7", "AUROC 0.80 of 7"),
        ("AUROC 0.80 of 7", "AUROC 0.80 of 8", "AUROC 0.80 of 7"),
        ("took … s", "took 12.7 s", None),
        ("a   b", "a b", None),
    ],
)
def test_outputs_are_compared(shown, printed, missing):
    assert difference(shown, printed) == missing


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command of a line, divided at ; | & outside of quotes."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set(";|&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def shell_commands(path: Path) -> list[tuple[int, list[str]]]:
    """(line, words) of every simple command in the shell blocks, without prompts and environment."""
    commands = []
    for block in blocks_of(path, "bash", "console", "sh", "shell"):
        source = block.source.replace("\\\n", " ")  # a continued line is one command
        for offset, line in enumerate(source.splitlines(), start=1):
            if block.language == "console" and not line.startswith("$ "):
                continue  # output
            for words in simple_commands(line.removeprefix("$ ")):
                while words and re.match(r"\w+=", words[0]):
                    words = words[1:]
                if words:
                    commands.append((block.line + offset, words))
    return commands


def why_unknown(words: list[str]) -> str | None:
    """What is wrong with a ``make`` or ``nguide`` command; other programs are not judged."""
    from typer.main import get_command

    from normal_guidance.cli.commands import app

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
