"""What the package runs on: its extras, memory and disk, its own commit, a Ray cluster; counts and times as texts."""

from __future__ import annotations

import ast
import ctypes
import inspect
import logging
import os
import pkgutil
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from normal_guidance.base.errors import UserError

PACKAGE = "normal-guidance"


class PackageExtra(NamedTuple):
    """Packages that some commands need; if none of the modules is there, the extra was not installed."""

    purpose: str
    modules: tuple[str, ...]


EXTRAS = {
    "dicom": PackageExtra("scans: nguide phantom, index, encode, predict, and slices in nguide view", ("pydicom",)),
    "encoders": PackageExtra(
        "features of scans: nguide encode and predict", ("transformers", "efficientnet_lite_pytorch", "h5py")
    ),
    "export": PackageExtra("models as ONNX graphs", ("onnxscript",)),
    "hub": PackageExtra("models to and from the Hugging Face Hub", ("huggingface_hub",)),
    "lightning": PackageExtra("the callback for Lightning's Trainer", ("lightning",)),
    "node": PackageExtra("nguide node", ("pynetdicom",)),
    "ray": PackageExtra("several machines: the option --ray", ("ray",)),
    "track": PackageExtra("the option --track", ("tensorboard", "mlflow")),
    "viewer": PackageExtra("nguide view", ("fastapi", "uvicorn")),
}
"""The extras that a user may want; `all` has them all."""


def install_command(*extras: str) -> str:
    """Return the command that brings the package with these extras."""
    return f"pip install '{PACKAGE}[{','.join(extras)}]'"


@contextmanager
def importing(extra: str, need: str) -> Iterator[None]:
    """Imports packages of an extra; where one is missing, the error is `need` and the command that installs it."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{need}; {install_command(extra)}") from error


def missing_extras(*extras: str) -> list[str]:
    """Return those of these extras that were not installed; nothing is imported."""
    return [extra for extra in extras if not any(find_spec(module) for module in EXTRAS[extra].modules)]


LIBRARIES = (
    "highdicom",
    "matplotlib",
    "nibabel",
    "onnx_ir",
    "onnxscript",
    "PIL",
    "pydicom",
    "pynetdicom",
    "torch",
    "transformers",
)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides what libraries warn of inside the block: a user of a command can do nothing about it."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.ERROR))
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Makes glibc keep large freed blocks, so the process never shrinks; returns whether it worked."""
    # Otherwise the system clears their pages before they are used again, which is half of the time of
    # EfficientNet-Lite0 on the CPU (LOG.md).
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it followed from, says that memory ran out, in torch's or a library's words."""
    if error is None:
        return False
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    said = isinstance(error, MemoryError) or any(word in str(error) for word in words)
    return said or type(error).__name__ == "OutOfMemoryError" or is_out_of_memory(error.__context__)


def peak_bytes(device: str) -> int:
    """Return the most memory that was taken so far: on CUDA of the card, else by this process."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_reserved(device)
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def usable_cores() -> float:
    """Return the cores that this process may use, by its affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return float(cores) if quota == "max" else min(float(cores), int(quota) / int(period))


def machine_memory() -> tuple[int | None, int | None]:
    """Return the bytes that a program may use and those free or reclaimable; None if the system hides them."""
    lines = (line.split() for line in (_read("/proc/meminfo") or "").splitlines())
    known = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if len(words) > 1}
    total, free = known.get("MemTotal"), known.get("MemAvailable")
    if total is None and hasattr(os, "sysconf"):  # Windows has neither
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max") or "max"
    if limit != "max" and (total is None or int(limit) < total):
        total = int(limit)
        used = int(_read("/sys/fs/cgroup/memory.current") or 0)
        free = max(0, total - used) if free is None else min(free, max(0, total - used))
    return total, free


def limit_memory(size: int) -> None:
    """Let this process take so many bytes more than it has; where the system knows no such limit, nothing happens."""
    pages = (_read("/proc/self/statm") or "").split()
    if not pages:  # not Linux
        return
    import resource

    limit, (_, hard) = int(pages[0]) * resource.getpagesize() + size, resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def disk(folder: Path) -> tuple[Path, int, bool]:
    """Return the folder or its first existing parent, its free bytes, and whether it can be written to."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    return there, shutil.disk_usage(there).free, os.access(there, os.W_OK)


def _read(file: str) -> str | None:
    """Return the text of one of the system's own files, or None where there is none."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None


SOURCE_FOLDER = Path(__file__).parents[1]  # the folder of this package


def source_version(package: Path = SOURCE_FOLDER) -> dict[str, Any] | None:
    """Return the commit of the checkout that holds a package, and whether files differ from it; None without one."""
    # The variable NGUIDE_COMMIT wins over git, because a stale repository may lie beside a copied tree; the result then
    # says "told".
    if told := os.environ.get("NGUIDE_COMMIT"):
        return {"id": told, "dirty": None, "told": True}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, or one without its history
        return None


@contextmanager
def environment_with(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


LARGEST_SEED = 2**31 - 1
"""The largest seed of folds: scikit-learn takes less than 2**32, and each repeat has the next one."""


def count_text(count: int, what: str) -> str:
    """Return a number of things; a plural ends in s."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(count: int) -> str:
    """Return bytes in the largest unit that fits."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count} B"


def time_text(seconds: float | int) -> str:
    """Return seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


ANSWER_SECONDS = 10.0  # longest wait for an answer of the cluster; Ray itself would try for minutes
RETRIES = 5  # how often Ray repeats a task whose machine or process died


@dataclass(frozen=True)
class Connection:
    """A connected cluster."""

    address: str

    def room(self, needs: Mapping[str, float], hint: str) -> int:
        """The number of tasks with these needs (CPU, GPU) that run at a time; a UserError with `hint` if it is 0."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(int(min(node.get(name, 0.0) // count for name, count in needs.items())) for node in nodes)
        if not room:
            wanted = ", ".join(f"{count:g} {name}" for name, count in needs.items())
            raise UserError(
                f"--ray {self.address}: none of the cluster's {len(nodes)} machines has {wanted}; {hint}, or add "
                "machines"
            )
        return room

    def result(self, task: Any) -> Any:
        """The result of a task."""
        import ray

        try:
            return ray.get(task)
        except UserError as error:
            raise UserError(str(getattr(error, "cause", error))) from error
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self.address}: a task failed ({error}); run the same command again to continue"
            ) from error


@contextmanager
def connected(address: str) -> Iterator[Connection]:
    """Connects to the cluster at this address for a block."""
    try:
        import ray
    except ImportError as error:
        raise UserError(f"ray is not installed; {install_command('ray')}, or leave out --ray") from error

    def no_answer(error: Exception) -> UserError:
        return UserError(f"--ray {address}: no cluster answers ({error}); start one: ray start --head")

    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:  # Ray checks other forms ('auto', 'ray://...') itself
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise no_answer(error) from error
    ending = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise no_answer(error) from error
    if ending is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ending)  # Ray's own would end the process and skip the command line's
    try:
        yield Connection(address)
    finally:
        ray.shutdown()


class _Face(ModuleType):
    """A package whose public names win over its rooms: `ng.fit` is the function, also once the room `fit` is loaded."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in self.__all__):
            super().__setattr__(name, value)


def lazy_names(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package with its imports under `if TYPE_CHECKING:` alone."""
    # What type checkers read there (`from .. import Bag as Bag`, which says that a name is public) is imported when it
    # is first used.  A wrong name is an AttributeError that suggests the nearest one.
    sys.modules[package].__class__ = _Face
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    listed = sorted(homes)

    def get(name: str) -> object:
        if name.startswith("__"):  # Python itself asks for such names
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in homes:
            home = import_module(homes[name])
            return getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")
        folded = {known.lower().replace("_", ""): known for known in listed}
        near = get_close_matches(name.lower().replace("_", ""), folded, n=1)
        hint = f"did you mean {folded[near[0]]!r}?" if near else f"it has {', '.join(listed)}"
        raise AttributeError(f"module {package!r} has no attribute {name!r}; {hint}")

    return listed, get, lambda: listed


def one_per_file(package: ModuleType, attribute: str) -> dict[str, Any]:
    """What each module of a package calls `attribute`, by the module's name, in alphabetical order."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: getattr(import_module(f"{package.__name__}.{name}"), attribute) for name in names}


def install_package(*extras: str) -> str:
    """Return the command that installs this package with extras, from the clone where there is one."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    root = clone()
    if root is None:
        return pip_install(f"{PACKAGE}{wanted}")
    pinned = root / "constraints.txt"
    return pip_install(*(["-c", str(pinned)] if pinned.is_file() else []), "-e", f"{root}{wanted}")


def clone() -> Path | None:
    """Return the clone of the repository that holds the package; None for an installed package."""
    root = SOURCE_FOLDER.parents[1]
    return root if (root / "pyproject.toml").is_file() and SOURCE_FOLDER.parent.name == "src" else None


def pip_install(*words: str) -> str:
    """Return the command that installs packages for the running Python."""
    return shlex.join([sys.executable, "-m", "pip", "install", *words])
