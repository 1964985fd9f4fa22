"""Made-up predictions, and a server in front of them, for the tests of `nguide view`."""

import json
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import uvicorn

from normal_guidance.clinic.viewer.gallery import Gallery
from normal_guidance.clinic.viewer.server import Access, make_app, make_server, open_socket
from normal_guidance.scans.index.manifest import Manifest
from normal_guidance.sweep.predictions import PREDICTIONS, write_predictions_table


def bell(slices: int, centre: float, width: float) -> np.ndarray:
    """Attention like a normal's density; never 0, like a softmax."""
    density = np.exp(-0.5 * ((np.arange(slices) - centre) / width) ** 2) + 1e-4
    return (density / density.sum()).astype(np.float32)


def rows_of(
    manifest: Manifest, *, heads: int = 1, shift: float = 0.0, part: str = "test", group: str = ""
) -> list[dict]:
    """Make one row a scan: every head is a bell, around the finding if there is one; heads are 2 slices apart."""
    rows = []
    for number, row in enumerate(manifest):
        labels = row.slice_labels if row.label else np.ones(len(row))
        centre = float(np.flatnonzero(labels).mean()) + shift
        each = np.stack([bell(len(row), centre + 2 * head, 1.5) for head in range(heads)])
        probability = 0.5 + (0.4 if row.label else -0.4) + 0.001 * number
        rows.append(
            {
                "group": group,
                "part": part if number % 3 else "val",
                "scan_id": row.scan_id,
                "patient_id": row.patient_id,
                "label": row.label,
                "logit": float(np.log(probability / (1 - probability))),
                "probability": probability,
                "slices": len(row),
                "attention": each.mean(0),
                "log_attention": list(np.log(each)),
            }
        )
    return rows


def write_predictions(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_predictions_table(folder / "predictions.parquet", [pa.Table.from_pylist(rows, schema=PREDICTIONS)])
    return folder


def write_result(folder: Path, scan_id: str, **changes: object) -> None:
    """A prediction.json as `nguide predict` writes it, and a summary."""
    about = {
        "threshold": 0.25,
        "positive": True,
        "key_slices": [{"slice": 4, "attention": 0.1}, {"slice": 2, "attention": 0.4}],
        "interval": {"first_slice": 2, "last_slice": 5, "share": None, "coverage": 0.9, "meaning": "contains it"},
        "source": {"series_description": "HEAD 5 mm"},
        "problems": [],
    }
    (folder / scan_id).mkdir(parents=True)
    (folder / scan_id / "prediction.json").write_text(json.dumps(about | changes))
    (folder / "summary.json").write_text(json.dumps({"model": {}}))


class Served:
    """A real server in its own thread, on a free port."""

    def __init__(self, gallery: Gallery, static: Path | None = None, **options: object) -> None:
        self._socket = open_socket(0)
        self.access = Access(self._socket.getsockname()[1])
        self.base = f"http://127.0.0.1:{self.access.port}"
        pages = {} if static is None else {"static": static}
        self._server: uvicorn.Server = make_server(make_app(gallery, self.access, **pages, **options))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> "Served":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()
