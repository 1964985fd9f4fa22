"""Convolutional encoders on the CPU through ONNX Runtime: torch's features in less than half of its time.

A network is exported once into the cache, and sealed.  Each thread runs a few images at a time, so features depend
neither on the number of threads nor on a batch's other images.  Torch encodes, and one line on stderr says so, where
ONNX Runtime is missing or fails, or where its features of the first images are not torch's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normal_guidance.base.errors import UserError, reason
from normal_guidance.base.files import OPEN, is_sealed, make_folder, remove_left_drafts, seal, write_atomically
from normal_guidance.base.system import install_command, without_warnings
from normal_guidance.scans.features.weights import cache_folder

TORCH = "torch"

OPSET = 17

IMAGES = 4  # that a thread encodes at a time: more are not faster, and leave threads idle at the end of a batch

CHECKED = 16  # first images that torch encodes, too

TOLERANCE = 1e-4
"""Largest difference from torch's features, relative to the largest.  Both compute in float32 and sum in other orders,
which makes about 1e-5 after 49 convolutions; a store in float16 rounds by 5e-4."""


class OnnxNetwork(nn.Module):
    """A network that ONNX Runtime computes, unless the first images show that its features are others."""

    def __init__(self, network: nn.Module, session: Any, engine: str) -> None:
        super().__init__()
        self.network, self.session, self.engine = network, session, engine
        self.is_checked = False
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        if self.engine == TORCH:
            return self.network(images)
        # One thread for each run, not several: they would wait for each other, and sums could depend on their number.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            features = torch.cat(list(pool.map(self._run, images.split(IMAGES))))
        if not self.is_checked:
            self.is_checked = True
            expected = self.network(images[:CHECKED])
            most = TOLERANCE * float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
            if not torch.allclose(features[:CHECKED], expected, rtol=0.0, atol=most, equal_nan=True):
                far = float((features[:CHECKED] - expected).abs().max())
                _say(f"features by {self.engine} differ from torch's by {far:.1e} ({most:.1e} is allowed)")
                self.engine = TORCH
                return self.network(images)
        return features

    def _run(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run(None, {"images": images.numpy()})[0])


def by_onnx(network: nn.Module, name: str, fingerprint: str, example: Tensor) -> nn.Module:
    """The network on ONNX Runtime, or itself where that cannot be; `example` is one image."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        _say(f"onnxruntime or onnx is not installed ({install_command('encoders')})")
        return network
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    made_by = json.dumps([fingerprint, torch.__version__, onnx.__version__, OPSET, list(example.shape)])
    path = cache_folder() / f"{name}-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}.onnx"
    try:
        graph = _cached(path) or _exported(network, example, path)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of many kinds, in two libraries
        _say(f"ONNX Runtime cannot run {name} ({reason(error)})")
        return network
    return OnnxNetwork(network, session, f"onnxruntime {onnxruntime.__version__}")


def _cached(path: Path) -> bytes | None:
    with suppress(OSError, UserError):  # missing, unreadable or damaged: it is made anew
        content = path.read_bytes()
        return content if is_sealed(content, path) else None
    return None


def _exported(network: nn.Module, example: Tensor, path: Path) -> bytes:
    """The network as an ONNX graph for any number of images; also written to `path`, if that is possible."""
    import onnx

    with tempfile.TemporaryDirectory() as folder, without_warnings():
        draft = Path(folder) / path.name
        # torch's older exporter: it takes .4 s and needs no onnxscript.
        torch.onnx.export(
            network,
            (example,),
            draft,
            dynamo=False,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["features"],
            dynamic_axes={"images": {0: "count"}, "features": {0: "count"}},
        )
        graph = onnx.load(draft)
    graph.metadata_props.add(key="normal_guidance", value=OPEN)
    content = seal(graph.SerializeToString())
    with suppress(OSError, UserError):  # a cache that cannot be written costs only time
        make_folder(path.parent)
        remove_left_drafts(path.parent, path.name)
        write_atomically(path, content)
    return content


@cache
def _say(why: str) -> None:
    """Says once on stderr why torch encodes."""
    print(f"warning: {why}; torch encodes instead, in more than twice the time", file=sys.stderr, flush=True)
