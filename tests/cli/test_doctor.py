"""`nguide doctor`: what it says here, and what it would say where something is missing, too old or broken."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normal_guidance import __version__
from normal_guidance.base import system
from normal_guidance.base.system import source_version
from normal_guidance.cli import doctor as checks
from normal_guidance.cli import probes
from normal_guidance.cli.doctor import Check, check_packages, report_lines, requirements, wrong_packages
from small_command import nguide

GOOD = Check("core", "ok", "torch 2.13.0", essential=True)


def nguide_doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normal_guidance.cli", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def hide(folder: Path, *modules: str) -> str:
    """A PYTHONPATH with which no process finds these modules."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {modules!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return str(folder)


def test_here_everything_that_the_core_needs_is_there(tmp_path):
    result = nguide_doctor("--json", NGUIDE_CACHE=str(tmp_path), TORCH_HOME=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert (found["ok"], found["normal_guidance"]) == (True, __version__)
    assert found["commit"] == source_version()
    assert {states[name] for name in ("python", "core", "extra dicom", "extra encoders", "codecs")} == {"ok"}
    assert (states["encoder efficientnet-lite0"], states["encoder vit-b16-imagenet"]) == ("ok", "missing")
    details = {check["name"]: check["details"] for check in found["checks"]}
    assert details["core"]["versions"]["torch"] == torch.__version__
    assert all(syntax["error"] is None for syntax in details["codecs"]["syntaxes"].values())
    assert "1.2.840.10008.1.2.4.70" in details["codecs"]["syntaxes"]


def test_without_extras_it_works_and_says_what_to_install(tmp_path):
    result = nguide_doctor("--json", PYTHONPATH=hide(tmp_path / "hidden", "pydicom", "gdcm", "transformers", "fastapi"))
    assert result.returncode == 0, result.stderr
    checks_ = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks_["extra dicom"]["state"] == "missing"
    assert checks_["extra dicom"]["found"] == "not installed: pydicom, python-gdcm"
    assert checks_["extra dicom"]["fix"].endswith("[dicom]'")
    assert checks_["codecs"]["state"] == "missing"
    assert "no DICOM can be read" in checks_["codecs"]["found"]
    assert checks_["encoder efficientnet-lite0"]["found"] == "its weights are here, but its code is not"
    assert checks_["extra viewer"]["state"] == "missing"
    assert checks_["core"]["state"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_torch", "found"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "importing ended the process (SIGILL"),
    ],
)
def test_a_broken_torch_is_told_and_fails(tmp_path, break_torch, found):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(break_torch)
    result = nguide_doctor(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert found in result.stdout
    assert "--force-reinstall 'torch>=" in result.stdout
    assert result.stdout.rstrip().endswith("No command works without: core")
    assert "unknown, because torch cannot be imported" in result.stdout


def test_every_package_that_is_needed_is_found_under_its_modules_name():
    """`MODULES` has the exceptions; a new requirement with another name belongs there."""
    needed = requirements()
    assert set(checks.EXTRAS) == set(needed) - {"", "all", "dev", "docs"}
    for extra in ("", *checks.EXTRAS):
        assert needed[extra]
        assert wrong_packages(needed[extra], {}) == {}


def test_an_installed_package_says_the_same_as_the_clone_and_nothing_without_metadata(monkeypatch, tmp_path):
    from_clone = requirements()
    monkeypatch.setattr(system, "SOURCE_FOLDER", tmp_path)
    installed = requirements()
    for extra in ("", *checks.EXTRAS):
        assert installed[extra] == from_clone[extra]
    assert check_packages("ray", {"no-such-package": "1.0"}).fix.endswith("pip install 'normal-guidance[ray]'")
    monkeypatch.setattr(checks, "PACKAGE", "no-such-package")
    assert requirements() == {}
    check = check_packages("", {}, {})
    assert (check.state, check.essential) == ("broken", True)


def test_packages_that_are_gone_old_or_broken():
    needed = {"numpy": "999.0", "pandas": "1.0", "no-such-package": "", "pyarrow": "1.0"}
    wrong = wrong_packages(needed, {"pandas": "ImportError: no GLIBC"})
    assert set(wrong) == {"numpy", "pandas", "no-such-package"}
    assert "too old; 999.0 or newer" in wrong["numpy"]
    assert "cannot be imported (ImportError: no GLIBC)" in wrong["pandas"]
    check = check_packages("", needed, {"pandas": "ImportError: no GLIBC"})
    assert (check.state, check.essential) == ("broken", True)
    assert check.found.startswith("not installed: no-such-package; numpy")
    assert "--force-reinstall 'numpy>=999.0' 'pandas>=1.0' no-such-package" in check.fix
    gone = check_packages("", {"no-such-package": "2.0"}, {})
    assert gone.state == "missing"
    assert gone.fix == f"{sys.executable} -m pip install 'no-such-package>=2.0'"
    # A process that dies breaks all that it was to import.
    assert set(wrong_packages({"numpy": "", "pandas": ""}, {"error": "SIGILL"})) == {"numpy", "pandas"}


def test_a_codec_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gdcm", None)
    check = checks.check_codecs(probes.probe_codecs())
    assert check.state == "missing"
    assert "10 of 15 transfer syntaxes can be decoded: Implicit VR Little Endian" in check.found
    assert "; not JPEG Baseline, JPEG Lossless (2), JPEG-LS Lossless, JPEG-LS Lossy (gdcm: " in check.found
    assert "[dicom]" in check.fix


def test_weights_that_are_not_here_come_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    vit, lite, hub = checks.check_weights(encoders_ready=True)
    assert (vit.state, lite.state, hub.state) == ("missing", "ok", "none")
    assert vit.fix.endswith("&& nguide weights import vit-b16-imagenet vit_b_16-c867db91.pth")
    assert "the first use downloads them" in vit.found
    monkeypatch.setenv("NGUIDE_OFFLINE", "1")
    assert "offline mode" in next(iter(checks.check_weights(encoders_ready=True))).found
    (tmp_path / "vit_b_16-c867db91.pth").touch()
    model = tmp_path / "hf" / "hub" / "models--microsoft--rad-dino" / "snapshots" / "abc"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    vit, _, hub = checks.check_weights(encoders_ready=True)
    assert vit.state == "ok"
    assert (hub.state, hub.details["models"]) == ("ok", ["microsoft/rad-dino"])


H200 = {"name": "NVIDIA H200", "bytes": 150 * 2**30, "capability": "9.0"}


@pytest.mark.parametrize(
    ("torch", "nvidia", "state", "found", "fix"),
    [
        ({"cuda": "12.8", "devices": [H200], "why": None}, True, "ok", "NVIDIA H200, 150.0 GiB, compute", ""),
        ({"cuda": None, "devices": [], "why": "built without CUDA"}, False, "none", "everything runs on the CPU", ""),
        ({"cuda": None, "devices": [], "why": "built without CUDA"}, True, "broken", "there is one, but", "uninstall"),
        ({"cuda": "12.8", "devices": [], "why": "driver too old"}, True, "broken", "driver too old", "nvidia-smi"),
        ({"error": "SIGILL"}, True, "none", "torch cannot be imported", ""),
    ],
)
def test_the_gpu_or_why_not(monkeypatch, torch, nvidia, state, found, fix):
    monkeypatch.setattr(checks, "_has_nvidia", lambda: nvidia)
    check = checks.check_gpu(torch)
    assert check.state == state
    assert found in check.found
    assert fix in check.fix
    assert bool(fix) == bool(check.fix)


@pytest.mark.parametrize(
    ("triton", "capability", "state", "found"),
    [
        ("3.6.0", "9.0", "ok", "Triton 3.6.0; kept in /caches/triton and /caches/inductor"),
        (None, "9.0", "none", "Triton is not installed; training on the card uses the packed engine"),
        ("3.6.0", "7.5", "none", "T4 has capability 7.5; training on the card uses the packed engine"),
    ],
)
def test_the_kernels_of_a_card_and_their_place(monkeypatch, triton, capability, state, found):
    monkeypatch.setattr(checks, "version_of", lambda package: triton)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/caches/triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/caches/inductor")
    card = {"name": "T4", "bytes": 2**34, "capability": capability}
    (check,) = checks.check_kernels({"cuda": "13.0", "devices": [card], "why": None})
    assert check.state == state
    assert check.found.startswith(found)
    assert list(checks.check_kernels({"cuda": None, "devices": [], "why": "no card"})) == []


def test_a_full_or_closed_disk_is_told(monkeypatch):
    def states() -> dict[str, str]:
        return {check.name: check.state for check in checks.check_machine() if check.name.startswith("disk")}

    for free, writable, state in ((10**12, True, "ok"), (2**30, True, "broken"), (10**12, False, "broken")):
        monkeypatch.setattr(checks, "disk", lambda folder, free=free, writable=writable: (folder, free, writable))
        assert set(states().values()) == {state}


def test_the_viewers_page(monkeypatch, tmp_path):
    for module in (checks, system):
        monkeypatch.setattr(module, "SOURCE_FOLDER", tmp_path / "src" / "normal_guidance")
    (page,) = checks.check_viewer(None)
    assert page.state == "missing"
    assert "--force-reinstall --no-deps normal-guidance" in page.fix
    (tmp_path / "src" / "normal_guidance").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "package.json").write_text('{"engines": {"node": ">=18"}}')
    page, node = checks.check_viewer("16.2.0")
    assert page.fix == f"make -C {tmp_path} viewer"
    assert node.state == "missing"
    assert "Node.js 18 or newer" in node.fix
    assert node.name == "Node.js"  # nguide node is another thing
    monkeypatch.setattr(checks.shutil, "which", lambda program: f"/usr/bin/{program}")
    assert next(reversed(list(checks.check_viewer("20.1.0")))).state == "ok"
    static = tmp_path / "src" / "normal_guidance" / "clinic" / "viewer" / "static"
    static.mkdir(parents=True)
    (static / "index.html").touch()
    page, node = checks.check_viewer(None)
    assert (page.state, node.state, node.fix) == ("ok", "none", "")


def test_only_what_is_essential_decides_the_exit_code(monkeypatch):
    extra = Check("extra dicom", "missing", "not installed: pydicom", "scans", "pip install it")
    for found, code, last in (
        ([GOOD], 0, "Everything is here"),
        (
            [GOOD, extra],
            0,
            "Everything that all commands need is here; missing or broken, and needed by some commands only: 1",
        ),
        ([replace(GOOD, state="broken"), extra], 1, "No command works without: core"),
    ):
        monkeypatch.setattr(checks, "examine", lambda found=found: (None, found))
        assert nguide("doctor", code=code).stdout.splitlines()[-1] == last
        assert json.loads(nguide("doctor", "--json", code=code).stdout)["ok"] is (code == 0)


def test_what_is_missing_comes_with_its_purpose_and_its_command():
    extra = Check("extra ray", "missing", "not installed: ray", "several machines", "pip install ray")
    lines = report_lines({"id": "5175879274098e", "dirty": True}, [GOOD, extra])
    assert lines[0] == f"nguide {__version__}, commit 5175879 with changes"
    assert [line.strip() for line in lines[3:5]] == ["for: several machines", "fix: pip install ray"]
