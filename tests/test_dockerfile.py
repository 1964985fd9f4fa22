"""The Dockerfile: what it promises is read from its text, and its steps run in folders in place of an image."""

import http.server
import re
import shutil
import subprocess
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from installed import finished, outside
from normal_guidance import __version__
from normal_guidance.cli.commands import app

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    """One instruction, and the stage that it belongs to."""

    stage: str
    word: str
    rest: str


def read_steps() -> list[Step]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    steps, stage = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, rest = line.split(maxsplit=1)
            if word == "FROM":
                stage = rest.partition(" AS ")[2] or "final"
            steps.append(Step(stage, word, " ".join(rest.split())))
    return steps


STEPS = read_steps()


def rests(word: str, stage: str = "final") -> list[str]:
    return [step.rest for step in STEPS if (step.stage, step.word) == (stage, word)]


def test_the_image_runs_the_node_without_root():
    assert rests("USER") == ["nguide"]
    final = [step.word for step in STEPS if step.stage == "final"]
    assert final.index("USER") > max(place for place, word in enumerate(final) if word in ("RUN", "COPY"))
    assert rests("ENTRYPOINT") == ['["nguide"]']
    assert rests("STOPSIGNAL") == ["SIGTERM"]
    assert rests("VOLUME") == ['["/models", "/var/lib/nguide"]']


def test_its_ports_and_its_command_are_those_of_the_node():
    node = get_command(app).commands["node"]
    options = {option.name: option.default for option in node.params}
    ports = [str(options["port"]), options["status"].rpartition(":")[2]]
    assert rests("EXPOSE") == [" ".join(ports)]
    assert f"http://{options['status']}/health" in rests("HEALTHCHECK")[0]
    command, *words = re.findall(r'"([^"]+)"', rests("CMD")[0])
    assert command == "node"
    assert {word for word in words if word.startswith("--")} <= {name for one in node.params for name in one.opts}


def test_no_stage_keeps_a_cache_or_names_an_index():
    text = (ROOT / "Dockerfile").read_text()
    for pip in re.findall(r"pip (?:install|wheel)[^&]*", text):
        assert "--no-cache-dir" in pip
    assert re.findall(r"https?://(?!127\.0\.0\.1)\S+", text) == []


def is_ignored(name: str) -> bool:
    """Whether .dockerignore leaves out a path: the last pattern that fits it or a folder of it decides."""
    ignored, paths = False, [name, *(str(one) for one in Path(name).parents if one.name)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if line and not line.startswith("#") and any(fnmatch(path, pattern) for path in paths):
            ignored = not line.startswith("!")
    return ignored


def test_what_it_copies_is_in_the_clone_and_not_ignored():
    copies = [step.rest.split() for step in STEPS if step.word == "COPY" and not step.rest.startswith("--from")]
    sources = [source.rstrip("/") for *several, _ in copies for source in several]
    assert [source for source in sources if not (ROOT / source).exists() or is_ignored(source)] == []
    assert is_ignored("tests")
    assert is_ignored("frontend/node_modules")
    assert is_ignored("src/normal_guidance/clinic/viewer/static")


@pytest.mark.parametrize(("answer", "code"), [(200, 0), (503, 1), (None, 1)])
def test_its_health_check_follows_the_node(answer, code):
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answer if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"ok": true or false}')

        def log_message(self, *_):
            pass

    (check,) = rests("HEALTHCHECK")
    words = re.findall(r'"([^"]+)"', check.partition("CMD ")[2])
    assert words[:2] == ["python", "-c"]
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        place = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        if answer is None:
            server.socket.close()
        else:
            thread.start()
        result = subprocess.run([sys.executable, "-c", words[2].replace("127.0.0.1:8112", place)], capture_output=True)
        if answer is not None:
            server.shutdown()
    assert result.returncode == code
    assert (answer is None) != (result.stdout == b'{"ok": true or false}\n'), "docker inspect shows what /health says"


def inside(root: Path, text: str) -> str:
    """A command with the folders of the image moved below `root`."""
    return re.sub(r"(?<![\w.$}])/(?=(?:build|dist|opt|models|var)\b)", f"{root}/", text)


def copy_from_clone(source: str, target: Path) -> None:
    """Copy a file or folder, without what .dockerignore leaves out."""
    if (ROOT / source).is_dir():
        leave = shutil.ignore_patterns("node_modules", "static", "__pycache__")
        shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=leave)
    else:
        shutil.copy(ROOT / source, target)


def run_stage(image: Path, stage: str, search: str) -> None:
    """Copy what a stage copies and run what it runs, in order, in a folder of its own."""
    root, variables = image / stage, {"PATH": search}
    here = root
    for step in (one for one in STEPS if one.stage == stage):
        if step.word == "WORKDIR":
            here = Path(inside(root, step.rest))
            here.mkdir(parents=True, exist_ok=True)
        elif step.word == "ARG":
            name, is_given, value = step.rest.partition("=")
            variables |= {name: value} if is_given else {}
        elif step.word == "COPY":
            *sources, target = step.rest.split()
            if sources[0].startswith("--from="):
                source = Path(inside(image / sources[0].removeprefix("--from="), sources[1]))
                shutil.copytree(source, here / target, dirs_exist_ok=True)
            else:
                for source in sources:
                    copy_from_clone(source, here / target)
        elif step.word == "RUN":
            finished("bash", "-ec", inside(root, step.rest), cwd=here, env={**outside(), **variables})


@pytest.mark.slow
def test_its_steps_make_an_environment_that_runs_the_node(tmp_path):
    """All but the last stage, whose only command makes a user; 2 GB on the disk."""
    if shutil.which("npm") is None:
        pytest.skip("THE DOCKERFILE IS NOT RUN: npm is not installed")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "builder"], check=True)  # the Python of the image
    search = f"{tmp_path / 'builder' / 'bin'}:{outside()['PATH']}"
    for stage in ("page", "package"):
        run_stage(tmp_path / "image", stage, search)
    made = tmp_path / "image" / "package" / "opt" / "nguide"
    nguide = made / "bin" / "nguide"
    environment = {**outside(), "PYTHONDONTWRITEBYTECODE": "1"}  # as in the image
    assert finished(nguide, "--version", env=environment).stdout == f"nguide {__version__}\n"
    words = (nguide, "node", tmp_path / "state", "--model", tmp_path / "none")
    assert "extra" not in finished(*words, code=2, env=environment).stderr
    size = sum(file.stat().st_size for file in made.rglob("*") if not file.is_symlink())
    print(f"environment of the image: {size / 2**20:.0f} MiB")
