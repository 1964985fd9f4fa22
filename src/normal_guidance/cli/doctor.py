"""`nguide doctor`: report what is installed and what is missing; `cli.probes` imports it, in parallel processes."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import typer

from normal_guidance import __version__
from normal_guidance.base.system import (
    EXTRAS,
    PACKAGE,
    SOURCE_FOLDER,
    clone,
    disk,
    install_package,
    machine_memory,
    pip_install,
    size_text,
    source_version,
    usable_cores,
)
from normal_guidance.cli import endings
from normal_guidance.cli.command import AsJson, print_result

PROBE_SECONDS = 60.0  # time limit of an import; a network disk may need some seconds
KERNELS_NEED = 8.0  # the compute capability that the recorded and the compiled engine need
LOW_DISK = 5 * 2**30  # less free space than this is reported: the features of 20,000 scans need about as much

MODULES = {
    "fhir-resources": "fhir.resources",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pylibjpeg-openjpeg": "openjpeg",
    "python-gdcm": "gdcm",
    "scikit-learn": "sklearn",
}
"""Packages whose module has another name."""

GONE = "is not installed"  # the fault of a package that is not there
State = Literal["ok", "none", "missing", "broken"]  # 'none': absent, and not needed
COLORS = {"ok": typer.colors.GREEN, "none": None, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}


def doctor(as_json: AsJson = False) -> None:
    """Check this installation: versions, codecs, encoders, GPU, disk. For each missing part, show how to install it.

    Exit code 0: everything that all commands need works; 1: part of it is missing or broken. The command reads no scan,
    makes no network call and changes nothing.
    """
    commit, checks = examine()
    ok = not any(check.is_wrong and check.essential for check in checks)
    document = {"format": 1, "ok": ok, "normal_guidance": __version__, "commit": commit}
    print_result(as_json, document | {"checks": list(map(asdict, checks))}, report_lines(commit, checks))
    if not ok:
        raise typer.Exit(endings.NOT_ALL.code)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    found: str
    purpose: str = ""  # the commands that need it
    fix: str = ""  # the command that repairs it, or advice where no command can
    essential: bool = False  # whether every command depends on it
    details: Mapping[str, Any] = field(default_factory=dict)  # for scripts

    @property
    def is_wrong(self) -> bool:
        return self.state in ("missing", "broken")


def examine() -> tuple[Mapping[str, Any] | None, list[Check]]:
    """Run all checks, and name the commit; most of the time goes to importing torch and scikit-learn, in parallel."""
    needed = requirements()
    core = needed.get("", {})
    modules = [module_of(name) for name in core if name not in ("torch", "typer", "rich")]  # the last two run this
    probes = {"torch": ["torch"], "imports": ["imports", *modules], "codecs": ["codecs"]}
    started = {name: _start(*words) for name, words in probes.items()}  # they run during the other checks
    commit, node = source_version(), _node_version()
    results = {name: _finish(process) for name, process in started.items()}
    torch = results["torch"]
    extras = {extra: check_packages(extra, needed.get(extra, {})) for extra in EXTRAS}
    checks = [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable})", essential=True),
        check_packages("", core, {**results["imports"], "torch": torch.get("error")}),
        *extras.values(),
        check_codecs(results["codecs"]),
        *check_weights(encoders_ready=extras["encoders"].state == "ok"),
        check_gpu(torch),
        *check_kernels(torch),
        *check_machine(),
        *check_viewer(node),
    ]
    return commit, checks


def report_lines(commit: Mapping[str, Any] | None, checks: Sequence[Check]) -> list[str]:
    built = "" if commit is None else f", commit {commit['id'][:7]}{' with changes' if commit['dirty'] else ''}"
    wide = max(len(check.name) for check in checks)
    lines, below = [f"nguide {__version__}{built}"], " " * (wide + 11)
    for check in checks:
        state = typer.style(f"{'-' if check.state == 'none' else check.state:8}", fg=COLORS[check.state])
        lines.append(f"{state} {check.name:{wide}}  {check.found}")
        if check.is_wrong:
            lines += [f"{below}for: {check.purpose}", f"{below}fix: {check.fix}"]
    wrong = [check for check in checks if check.is_wrong]
    broken = [check.name for check in wrong if check.essential]
    if broken:
        return [*lines, f"No command works without: {', '.join(broken)}"]
    if not wrong:
        return [*lines, "Everything is here"]
    some = "missing or broken, and needed by some commands only"
    return [*lines, f"Everything that all commands need is here; {some}: {len(wrong)}"]


def requirements() -> dict[str, dict[str, str]]:
    """Return the lowest version of every needed package, for the core ("") and for each extra."""
    root = clone()
    if root is not None:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        return {extra: dict(map(_parse, _expanded(lines, groups))) for extra, lines in groups.items()}
    needed: dict[str, dict[str, str]] = {}
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # copied without its metadata: the requirements are unknown
        return needed
    for line in lines:
        extra = re.search(r"extra == ['\"](\w+)", line)
        name, least = _parse(line)
        needed.setdefault(extra.group(1) if extra else "", {})[name] = least
    return needed


def _expanded(lines: Iterable[str], groups: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Requirements with the extras of this package that they name, as an installed package lists them."""
    for line in lines:
        ours = re.match(rf"{PACKAGE}\[([^]]*)\]", line)
        if ours is None:
            yield line
        else:
            for extra in ours[1].split(","):
                yield from _expanded(groups[extra.strip()], groups)


def _parse(line: str) -> tuple[str, str]:
    """Return name and lowest version of a requirement."""
    match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?", line)
    assert match is not None
    return match.group(1), match.group(2) or ""


def module_of(package: str) -> str:
    return MODULES.get(package, package.replace("-", "_"))


def wrong_packages(packages: Mapping[str, str], errors: Mapping[str, Any]) -> dict[str, str]:
    """Return the fault of each package that is missing, too old, or cannot be imported; `errors` are by module."""
    wrong = {}
    for package, least in packages.items():
        module, version = module_of(package), version_of(package)
        error = errors.get("error") or errors.get(module)
        try:
            is_there = find_spec(module) is not None
        except (ImportError, ValueError):
            is_there = False
        if version is None or not is_there:
            wrong[package] = GONE
        elif least and numbers_of(version) < numbers_of(least):
            wrong[package] = f"{version} is too old; {least} or newer is needed"
        elif error:
            wrong[package] = f"{version} cannot be imported ({error})"
    return wrong


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def check_packages(extra: str, needed: Mapping[str, str], errors: Mapping[str, Any] | None = None) -> Check:
    """Check the packages of the core ("") or of an extra; `errors` are those of importing them."""
    name = f"extra {extra}" if extra else "core"
    purpose = EXTRAS[extra].purpose if extra else "every command"
    if not needed and not extra:
        text = "the package has no metadata, so its requirements are unknown"
        return Check(name, "broken", text, purpose, install_package(), essential=True)
    wrong = wrong_packages(needed, errors or {})
    versions = {package: version_of(package) for package in needed}
    details = {"versions": versions, "wrong": wrong}
    if not wrong:
        text = ", ".join(f"{package} {version}" for package, version in versions.items())
        return Check(name, "ok", text, essential=not extra, details=details)
    gone = [package for package, fault in wrong.items() if fault == GONE]
    faults = [f"{package} {fault}" for package, fault in wrong.items() if fault != GONE]
    fix = install_package(extra)
    if not extra:
        again = [f"{package}>={needed[package]}" if needed[package] else package for package in wrong]
        fix = pip_install(*(["--force-reinstall"] if faults else []), *again)
    text = "; ".join([*([f"not installed: {', '.join(gone)}"] if gone else []), *faults])
    return Check(name, "broken" if faults else "missing", text, purpose, fix, not extra, details)


def check_codecs(syntaxes: Mapping[str, Any]) -> Check:
    """Check which transfer syntaxes of DICOM can be decoded."""
    fix = install_package("dicom")
    if "error" in syntaxes:
        text = f"no DICOM can be read: {syntaxes['error']}"
        return Check("codecs", "missing", text, "DICOM", fix, details=syntaxes)
    good = [syntax for syntax in syntaxes.values() if not syntax["error"]]
    bad = [syntax for syntax in syntaxes.values() if syntax["error"]]
    text = f"{len(good)} of {len(syntaxes)} transfer syntaxes can be decoded: {_families(good)}"
    if not bad:
        return Check("codecs", "ok", text, details={"syntaxes": syntaxes})
    why = "; ".join({syntax["decoder"]: f"{syntax['decoder']}: {syntax['error']}" for syntax in bad}.values())
    text += f"; not {_families(bad)} ({why})"
    return Check("codecs", "missing", text, "compressed DICOM", fix, details={"syntaxes": syntaxes})


def _families(syntaxes: Sequence[Mapping[str, str]]) -> str:
    """Return short names, each once, with the number of syntaxes where a name has several."""
    counts = Counter(re.split(r" Image| with|[,(]", syntax["name"])[0].strip() for syntax in syntaxes)
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in counts.items())


def check_weights(encoders_ready: bool) -> Iterator[Check]:
    """Check which encoders work without a network; weight files are found, not read (`nguide weights check` does)."""
    from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, find_weights, is_offline

    for name, known in KNOWN_WEIGHTS.items():
        file = find_weights(name)
        label, purpose, fix = f"encoder {name}", f"nguide encode --encoder {name}", install_package("encoders")
        details = {"file": None if file is None else str(file), "offline": is_offline()}
        if file is not None and encoders_ready:
            yield Check(label, "ok", f"ready without a network: {file}", details=details)
            continue
        if file is not None:
            text = "its weights are here, but its code is not"
        elif known.url is None:
            text = f"its weights come with the {known.source}, which is not installed"
        else:
            offline = "offline mode is set (NGUIDE_OFFLINE)" if is_offline() else "the first use downloads them"
            text = f"its weights ({known.mib} MiB) are not on this machine; {offline}"
            fix = f"curl -fLO {known.url} && nguide weights import {name} {known.file}"
        yield Check(label, "missing", text, purpose, fix, details=details)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    snapshots = {config.parents[2].name for config in folder.glob("models--*/snapshots/*/config.json")}
    models = sorted(name.removeprefix("models--").replace("--", "/") for name in snapshots)
    text = f"in {folder}: {', '.join(models)}" if models else f"no model in {folder}"
    about = {"folder": str(folder), "models": models}
    yield Check("Hugging Face", "ok" if models else "none", text, details=about)


def check_gpu(torch: Mapping[str, Any]) -> Check:
    """Report the CUDA devices, or why there are none.  Everything works without one, only more slowly."""
    cards = [
        f"{card['name']}, {size_text(card['bytes'])}, compute capability {card['capability']}"
        for card in torch.get("devices", [])
    ]
    if cards:
        return Check("gpu", "ok", f"{'; '.join(cards)} (CUDA {torch['cuda']})", details=torch)
    if "error" in torch:
        return Check("gpu", "none", "unknown, because torch cannot be imported", details=torch)
    if not _has_nvidia():
        return Check("gpu", "none", f"none: {torch['why']}; everything runs on the CPU", details=torch)
    fix = "nvidia-smi, and a driver that fits this torch: https://www.nvidia.com/drivers"
    if torch["cuda"] is None:
        fix = f"{shlex.quote(sys.executable)} -m pip uninstall -y torch && {pip_install('torch')}"
    text = f"there is one, but {torch['why']}"
    return Check("gpu", "broken", text, "training and encoding fast", fix, details=torch)


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def check_kernels(torch: Mapping[str, Any]) -> Iterator[Check]:
    """Report whether the fast engines can run on a card, and where they keep what they compiled."""
    devices = torch.get("devices")
    if not devices:
        return
    triton, old = version_of("triton"), [card for card in devices if float(card["capability"]) < KERNELS_NEED]
    if triton and not old:
        user = re.sub(r"[\\/:*?\"<>|]", "_", getpass.getuser())
        kernels = Path(os.environ.get("TRITON_HOME", Path.home()), ".triton", "cache")
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{user}")
        caches = {
            "kernels": os.environ.get("TRITON_CACHE_DIR") or str(kernels),
            "compiled": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(compiled),
        }
        text = f"Triton {triton}; kept in {' and '.join(caches.values())}"
        yield Check("gpu kernels", "ok", text, details={"triton": triton, **caches})
        return
    why = "Triton is not installed" if not triton else f"{old[0]['name']} has capability {old[0]['capability']}"
    text = f"{why}; training on the card uses the packed engine, which is several times slower"
    yield Check("gpu kernels", "none", text, fix="" if triton else pip_install("triton"), details={"triton": triton})


def check_machine() -> Iterator[Check]:
    """Report cores, memory, and free space on the disks that are written to."""
    from normal_guidance.scans.features.weights import cache_folder

    cores, (total, free) = usable_cores(), machine_memory()
    yield Check("cpu", "ok", f"{cores:g} cores ({platform.machine()})", details={"cores": cores})
    known = [f"{size_text(size)}{text}" for size, text in ((total, ""), (free, " free")) if size is not None]
    yield Check("memory", "ok", ", ".join(known) or "unknown", details={"bytes": total, "free": free})
    for name, folder, elsewhere in (
        ("disk, working folder", Path.cwd(), "work in another folder, or write elsewhere: -o DIR"),
        ("disk, cache", cache_folder(), "export NGUIDE_CACHE=/another/folder"),
    ):
        there, size, writable = disk(folder)
        details = {"folder": str(folder), "free": size, "writable": writable}
        if not writable:
            yield Check(name, "broken", f"{there} cannot be written to", "results", elsewhere, details=details)
        elif size < LOW_DISK:
            text = f"only {size_text(size)} free at {there}"
            yield Check(name, "broken", text, "results", f"make room, or {elsewhere}", details=details)
        else:
            yield Check(name, "ok", f"{size_text(size)} free at {folder}", details=details)


def check_viewer(node: str | None) -> Iterator[Check]:
    """Check the page that `nguide view` serves and, in a clone, the tools that build it."""
    built, root = (SOURCE_FOLDER / "clinic" / "viewer" / "static" / "index.html").is_file(), clone()
    if built:
        yield Check("viewer's page", "ok", "built")
    elif root is None:
        fix = pip_install("--force-reinstall", "--no-deps", PACKAGE)
        yield Check("viewer's page", "missing", "not in this installation", "nguide view", fix)
    else:
        yield Check("viewer's page", "missing", "not built", "nguide view", f"make -C {shlex.quote(str(root))} viewer")
    if root is None:
        return
    least = json.loads((root / "frontend" / "package.json").read_text())["engines"]["node"].lstrip(">=")
    npm = shutil.which("npm")
    details = {"node": node, "npm": npm}
    purpose, fix = "building the viewer's page", f"install Node.js {least} or newer with npm: https://nodejs.org"
    if node is not None and npm and numbers_of(node) >= numbers_of(least):
        yield Check("Node.js", "ok", f"{node}, npm", details=details)
    else:
        text = "not installed, or without npm" if node is None or not npm else f"{node} is too old"
        yield Check("Node.js", "none" if built else "missing", text, purpose, "" if built else fix, details=details)


def _node_version() -> str | None:
    if clone() is None or shutil.which("node") is None:
        return None
    try:
        answer = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().lstrip("v")


def _start(*words: str) -> subprocess.Popen[str]:
    # By path, with its folder off sys.path (-P): `-m` would import all commands in each process.
    command = [sys.executable, "-P", str(Path(__file__).with_name("probes.py")), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    """Return what a probe printed last; a process that printed nothing has died or hangs, and the error says so."""
    try:
        output, complaint = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"importing did not end within {PROBE_SECONDS:g} s"}
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError):
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = complaint.strip().splitlines()[-1:]
        return {"error": f"importing ended the process ({': '.join([how, *last])})"}
