"""`nguide doctor`: report what is installed and what is missing, with the command that repairs it."""

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
from normal_guidance.cli.command import AsJson, print_json

BROKEN_EXIT_CODE = 1
"""A package that every command needs is missing or broken."""

COLORS = {"ok": typer.colors.GREEN, "none": None, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}


def doctor(as_json: AsJson = False) -> None:
    """Check this installation: versions, codecs, encoders, GPU, disk. For each missing part, show how to install it.

    Exit code 0: everything that all commands need works; 1: part of it is missing or broken. The command reads no scan,
    makes no network call and changes nothing.
    """

    diagnosis = examine()
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        for line in describe(diagnosis):
            typer.echo(line)
    if not diagnosis.ok:
        raise typer.Exit(BROKEN_EXIT_CODE)


def describe(diagnosis: Diagnosis) -> list[str]:
    """Return the lines to print."""
    commit = diagnosis.commit
    built = "" if commit is None else f", commit {commit['id'][:7]}{' with changes' if commit['dirty'] else ''}"
    wide = max(len(check.name) for check in diagnosis.checks)
    lines = [f"nguide {__version__}{built}"]
    for check in diagnosis.checks:
        lines += _lines(check, wide)
    wrong = [check for check in diagnosis.checks if check.state in ("missing", "broken")]
    broken = [check.name for check in wrong if check.essential]
    if broken:
        lines.append(f"No command works without: {', '.join(broken)}")
    elif wrong:
        lines.append(
            "Everything that all commands need is here; missing or broken, and needed by some commands only: "
            f"{len(wrong)}"
        )
    else:
        lines.append("Everything is here")
    return lines


def _lines(check: Check, wide: int) -> list[str]:
    state = typer.style(f"{'-' if check.state == 'none' else check.state:8}", fg=COLORS[check.state])
    below = " " * (wide + 11)
    lines = [f"{state} {check.name:{wide}}  {check.found}"]
    if check.state in ("missing", "broken"):
        lines += [f"{below}for: {check.purpose}", f"{below}fix: {check.fix}"]
    return lines


# The packages that the core and each extra need, their faults, and the commands that install them.


MODULES = {
    "fhir-resources": "fhir.resources",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pylibjpeg-openjpeg": "openjpeg",
    "python-gdcm": "gdcm",
    "scikit-learn": "sklearn",
}
"""Packages whose module has another name."""

GONE = "is not installed"
"""The fault of a package that is not there."""


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
    """Return the name of a package's module."""
    return MODULES.get(package, package.replace("-", "_"))


def wrong_packages(packages: Mapping[str, str], errors: Mapping[str, Any]) -> dict[str, str]:
    """Return the fault of each package that is missing, too old, or cannot be imported.

    Args:
        packages: names and lowest versions.
        errors: import errors by module; modules without an entry are only looked for.
    """
    wrong = {}
    for package, least in packages.items():
        module, version = module_of(package), version_of(package)
        error = errors.get("error") or errors.get(module)
        if version is None or not _is_there(module):
            wrong[package] = GONE
        elif least and numbers_of(version) < numbers_of(least):
            wrong[package] = f"{version} is too old; {least} or newer is needed"
        elif error:
            wrong[package] = f"{version} cannot be imported ({error})"
    return wrong


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


# The checks of `nguide doctor`: the state of each part, its purpose, and the command that repairs it.
# Nothing heavy is imported here: `normal_guidance.cli.probes` imports packages in parallel processes.


PROBE_SECONDS = 60.0
"""Time limit of an import; a network disk may need some seconds."""

KERNELS_NEED = 8.0
"""The compute capability that the recorded and the compiled engine need."""

LOW_DISK = 5 * 2**30
"""Less free space than this is reported: the features of 20,000 scans need about as much."""

State = Literal["ok", "none", "missing", "broken"]
"""'none': absent, and not needed."""

Found = Mapping[str, Any]
"""The result of a probe, or its error."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: name of the part.
        state: whether it is here, and works.
        found: description, for people.
        purpose: the commands that need it, where it is missing or broken.
        fix: the command that repairs it, or advice where no command can.
        essential: whether every command depends on it.
        details: values, for scripts.
    """

    name: str
    state: State
    found: str
    purpose: str = ""
    fix: str = ""
    essential: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """The results of all checks."""

    commit: Mapping[str, Any] | None
    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        """Whether every essential part works."""
        return all(check.state in ("ok", "none") for check in self.checks if check.essential)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that --json prints."""
        return {
            "format": 1,
            "ok": self.ok,
            "normal_guidance": __version__,
            "commit": self.commit,
            "checks": [asdict(check) for check in self.checks],
        }


def examine() -> Diagnosis:
    """Run all checks; most of the time goes to importing torch and scikit-learn, in parallel."""
    needed = requirements()
    core = needed.get("", {})
    modules = [
        module_of(name) for name in core if name not in ("torch", "typer", "rich")
    ]  # typer and rich run this command
    probes = {name: _start(*words) for name, words in _probes(modules).items()}  # they run during the other checks
    known, node = source_version(), _node_version()
    found = {name: _finish(process) for name, process in probes.items()}
    extras = [check_extra(extra, needed.get(extra, {})) for extra in EXTRAS]
    torch = found["torch"]
    checks = [
        check_python(),
        check_core(core, {**found["imports"], "torch": torch.get("error")}),
        *extras,
        check_codecs(found["codecs"]),
        *check_weights(encoders_ready=extras[1].state == "ok"),
        check_gpu(torch),
        *check_kernels(torch),
        *check_machine(),
        *check_viewer(node),
    ]
    return Diagnosis(known, checks)


def _versions(needed: Mapping[str, str]) -> dict[str, str | None]:
    return {package: version_of(package) for package in needed}


def check_python() -> Check:
    """Report which Python runs this."""
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})", essential=True)


def check_core(needed: Mapping[str, str], errors: Found) -> Check:
    """Check that each package of the core is installed, new enough, and can be imported."""
    purpose = "every command"
    if not needed:
        found = "the package has no metadata, so its requirements are unknown"
        return Check("core", "broken", found, purpose, install_package(), essential=True)
    wrong = wrong_packages(needed, errors)
    if not wrong:
        return Check("core", "ok", _list(needed), essential=True, details={"versions": _versions(needed)})
    again = [f"{name}>={needed[name]}" if needed[name] else name for name in wrong]
    gone = all(what == GONE for what in wrong.values())
    return Check(
        "core",
        "missing" if gone else "broken",
        _sentence(wrong),
        purpose,
        pip_install(*([] if gone else ["--force-reinstall"]), *again),
        essential=True,
        details={"versions": _versions(needed), "wrong": wrong},
    )


def check_extra(extra: str, needed: Mapping[str, str]) -> Check:
    """Check the packages of an extra without importing them; `check_codecs` imports the decoders."""
    wrong = wrong_packages(needed, {})
    details = {"versions": _versions(needed), "wrong": wrong}
    if not wrong:
        return Check(f"extra {extra}", "ok", _list(needed), details=details)
    gone = all(what == GONE for what in wrong.values())
    return Check(
        f"extra {extra}",
        "missing" if gone else "broken",
        _sentence(wrong),
        EXTRAS[extra].purpose,
        install_package(extra),
        details=details,
    )


def _list(needed: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in _versions(needed).items())


def _sentence(wrong: Mapping[str, str]) -> str:
    """Name the packages that are not installed together, then the others one by one."""
    gone = [name for name, what in wrong.items() if what == GONE]
    rest = [f"{name} {what}" for name, what in wrong.items() if what != GONE]
    return "; ".join([*([f"not installed: {', '.join(gone)}"] if gone else []), *rest])


def check_codecs(found: Found) -> Check:
    """Check which transfer syntaxes of DICOM can be decoded."""
    purpose, fix = "compressed DICOM", install_package("dicom")
    if "error" in found:
        return Check("codecs", "missing", f"no DICOM can be read: {found['error']}", "DICOM", fix, details=found)
    good = [one for one in found.values() if not one["error"]]
    bad = [one for one in found.values() if one["error"]]
    text = f"{len(good)} of {len(found)} transfer syntaxes can be decoded: {_families(good)}"
    if not bad:
        return Check("codecs", "ok", text, details={"syntaxes": found})
    why = "; ".join({one["decoder"]: f"{one['decoder']}: {one['error']}" for one in bad}.values())
    text += f"; not {_families(bad)} ({why})"
    return Check("codecs", "missing", text, purpose, fix, details={"syntaxes": found})


def _families(syntaxes: Sequence[Mapping[str, str]]) -> str:
    """Return short names, each once, with the number of syntaxes where a name has several."""
    counts = Counter(re.split(r" Image| with|[,(]", one["name"])[0].strip() for one in syntaxes)
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in counts.items())


def check_weights(encoders_ready: bool) -> Iterator[Check]:
    """Check which encoders work without a network; weight files are found, not read (`nguide weights check` does)."""
    from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, find_weights, is_offline

    for name, known in KNOWN_WEIGHTS.items():
        file = find_weights(name)
        label, purpose = f"encoder {name}", f"nguide encode --encoder {name}"
        details = {"file": None if file is None else str(file), "offline": is_offline()}
        if file is not None and encoders_ready:
            yield Check(label, "ok", f"ready without a network: {file}", details=details)
        elif file is not None:
            yield Check(
                label, "missing", "its weights are here, but its code is not", purpose, install_package("encoders")
            )
        elif known.url is None:
            found = f"its weights come with the {known.source}, which is not installed"
            yield Check(label, "missing", found, purpose, install_package("encoders"), details=details)
        else:
            offline = "; offline mode is set (NGUIDE_OFFLINE)" if is_offline() else "; the first use downloads them"
            found = f"its weights ({known.mib} MiB) are not on this machine{offline}"
            fix = f"curl -fLO {known.url} && nguide weights import {name} {known.file}"
            yield Check(label, "missing", found, purpose, fix, details=details)
    folder, models = huggingface_models()
    some = f"in {folder}: {', '.join(models)}" if models else f"no model in {folder}"
    yield Check(
        "Hugging Face", "ok" if models else "none", some, details={"folder": str(folder), "models": list(models)}
    )


def huggingface_models() -> tuple[Path, list[str]]:
    """Return the cache folder of Hugging Face, and the names of all models in it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    places = {place.parents[1].name for place in folder.glob("models--*/snapshots/*/config.json")}
    return folder, sorted(name.removeprefix("models--").replace("--", "/") for name in places)


def check_gpu(torch: Found) -> Check:
    """Report the CUDA devices, or why there are none.  Everything works without one, only more slowly."""
    devices = torch.get("devices", [])
    if devices:
        text = "; ".join(
            f"{one['name']}, {size_text(one['bytes'])}, compute capability {one['capability']}" for one in devices
        )
        return Check("gpu", "ok", f"{text} (CUDA {torch['cuda']})", details=torch)
    if "error" in torch:
        return Check("gpu", "none", "unknown, because torch cannot be imported", details=torch)
    if not _has_nvidia():
        return Check("gpu", "none", f"none: {torch['why']}; everything runs on the CPU", details=torch)
    if torch["cuda"] is None:
        again = f"{shlex.quote(sys.executable)} -m pip uninstall -y torch && {pip_install('torch')}"
    else:
        again = "nvidia-smi, and a driver that fits this torch: https://www.nvidia.com/drivers"
    return Check(
        "gpu", "broken", f"there is one, but {torch['why']}", "training and encoding fast", again, details=torch
    )


def check_kernels(torch: Found) -> Iterator[Check]:
    """Report whether the fast engines can run on a card, and where they keep what they compiled."""
    if not torch.get("devices"):
        return
    triton, old = version_of("triton"), [one for one in torch["devices"] if float(one["capability"]) < KERNELS_NEED]
    caches = kernel_caches()
    kept = " and ".join(map(str, caches.values()))
    if triton and not old:
        yield Check("gpu kernels", "ok", f"Triton {triton}; kept in {kept}", details={"triton": triton, **caches})
        return
    why = "Triton is not installed" if not triton else f"{old[0]['name']} has capability {old[0]['capability']}"
    found = f"{why}; training on the card uses the packed engine, which is several times slower"
    yield Check("gpu kernels", "none", found, fix="" if triton else pip_install("triton"), details={"triton": triton})


def kernel_caches() -> dict[str, str]:
    """Return the folders in which Triton and torch's compiler keep kernels, so that they are compiled once."""
    user = re.sub(r"[\\/:*?\"<>|]", "_", getpass.getuser())
    places = {
        "kernels": ("TRITON_CACHE_DIR", Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"),
        "compiled": ("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{user}"),
    }
    return {name: os.environ.get(variable) or str(place) for name, (variable, place) in places.items()}


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


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
    built = (SOURCE_FOLDER / "clinic" / "viewer" / "static" / "index.html").is_file()
    root = clone()
    if built:
        yield Check("viewer's page", "ok", "built")
    elif root is None:
        again = pip_install("--force-reinstall", "--no-deps", PACKAGE)
        yield Check("viewer's page", "missing", "not in this installation", "nguide view", again)
    else:
        yield Check("viewer's page", "missing", "not built", "nguide view", f"make -C {shlex.quote(str(root))} viewer")
    if root is None:
        return
    least = json.loads((root / "frontend" / "package.json").read_text())["engines"]["node"].lstrip(">=")
    details = {"node": node, "npm": shutil.which("npm")}
    purpose, fix = "building the viewer's page", f"install Node.js {least} or newer with npm: https://nodejs.org"
    if node is not None and details["npm"] and numbers_of(node) >= numbers_of(least):
        yield Check("Node.js", "ok", f"{node}, npm", details=details)
    else:
        old = "not installed, or without npm" if node is None or not details["npm"] else f"{node} is too old"
        yield Check("Node.js", "none" if built else "missing", old, purpose, "" if built else fix, details=details)


def _node_version() -> str | None:
    if clone() is None or shutil.which("node") is None:
        return None
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().lstrip("v")


def _probes(modules: Sequence[str]) -> dict[str, list[str]]:
    return {"torch": ["torch"], "imports": ["imports", *modules], "codecs": ["codecs"]}


def _start(*words: str) -> subprocess.Popen[str]:
    # By path, with its folder off sys.path (-P): `-m` would import all commands in each process.
    command = [sys.executable, "-P", str(Path(__file__).with_name("probes.py")), *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str]) -> Found:
    """Return what a probe printed last; a process that printed nothing has died or hangs, and the error says so."""
    try:
        said, complaint = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"importing did not end within {PROBE_SECONDS:g} s"}
    try:
        return dict(json.loads(said.splitlines()[-1]))
    except (IndexError, ValueError):
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = complaint.strip().splitlines()[-1:]
        return {"error": f"importing ended the process ({': '.join([how, *last])})"}
