"""Small experiments for the tests of everything behind `nguide experiment`: stores, splits, phantoms, small grids."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import PARTS, Manifest, read_manifest
from normal_guidance.scans.phantom.phantom_files import write_phantom
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import Study, stored_dataset
from normal_guidance.sweep.config import Config, grid

# Any epoch may be selected, so that few epochs on few scans have a winner.
PROTOCOL = Config("ng", epochs=3, batch_size=16, train_above_val=False)

SEEDS = (1001, 2001)
HOPELESS = 1e39
"""A learning rate beyond float32: every logit is NaN after the first epoch, so no epoch can be selected."""


def small_grid(base: Config) -> tuple[Config, ...]:
    return grid(base, lr=[0.1, 0.01], l1=[0.0])


def small_sensitivity(base: Config) -> tuple[Config, ...]:
    return grid(base, lr=[0.1], l1=[0.0], divergence=["forward_kl", "reverse_kl"], guidance_weight=[0.1, 1.0])


def some_scans(count: int = 72, seed: int = 7, **options: float) -> Bags:
    """Scans of 12 to 20 slices, half of them positive in 4 slices; each patient has two scans."""
    sizes = {"features": 8, "min_slices": 12, "max_slices": 20, "block": 4, "shift": 2.0, **options}
    bags = shifted_mean(count, seed, **sizes)
    return replace(bags, patient_ids=tuple(f"patient-{number // 2}" for number in range(count)))


def part_of(number: int, seed: int) -> str:
    """By patient, a third each; a third of the patients is in the same part for every seed, as chance has it."""
    patient = number // 2
    return PARTS[(patient + patient // 3 * (seed // 1000)) % 3]


def write_splits(folder: Path, scan_ids: Sequence[str], seeds: Sequence[int] = SEEDS) -> list[Path]:
    """split-SEED.csv, as `nguide split` names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        lines = [f"{scan},{part_of(number, seed)}" for number, scan in enumerate(scan_ids)]
        (folder / f"split-{seed}.csv").write_text("\n".join(["scan_id,part", *lines, ""]))
    return [folder / f"split-{seed}.csv" for seed in seeds]


def make_store(folder: Path, bags: Bags | None = None, **options: object) -> FeatureStore:
    """A store without parts of its own."""
    provenance = {"encoder": "noise", **options}
    write_store(folder, some_scans() if bags is None else bags, provenance=provenance)
    return open_store(folder)


def make_study(
    folder: Path, methods: Sequence[str], bags: Bags | None = None, *, name: str = "small", **changes: object
) -> Study:
    """A store, two splits of it, and a study of them that is still to be trained."""
    store = make_store(folder / "store", bags)
    dataset = stored_dataset([store.folder], write_splits(folder / "splits", store.scan_ids), name)
    return Study(dataset, folder / "out", tuple(methods), dataset.seeds, PROTOCOL, **changes)


def without_slice_labels(bags: Bags, numbers: Sequence[int] | None = None) -> Bags:
    """The same scans; the slices of all, or of those numbered, are unlabelled."""
    if numbers is None:
        return replace(bags, slice_labels=None)
    chosen = torch.zeros(len(bags), dtype=torch.bool)
    chosen[list(numbers)] = True
    return replace(bags, slice_labels=bags.slice_labels.masked_fill(chosen.repeat_interleave(bags.lengths), -1))


def make_phantom(folder: Path, scans: int = 24) -> Manifest:
    """A phantom in FOLDER/scans, its index in FOLDER/index, and in FOLDER/store features that nobody encoded."""
    write_phantom("folder", folder / "scans", scans=scans, seed=3, size=32, slices=12, positive=0.5)
    index("folder", folder / "scans", folder / "index", table=folder / "scans" / "labels.csv")
    manifest = read_manifest(folder / "index")
    labels = torch.cat([torch.from_numpy(row.slice_labels).long() for row in manifest])
    features = torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(1))
    features[:, 0] += 2 * labels
    bags = Bags(
        features,
        torch.from_numpy(manifest.lengths),
        torch.from_numpy(manifest.labels),
        labels,
        scan_ids=tuple(manifest.scan_ids),
        patient_ids=tuple(manifest.patient_ids),
    )
    make_store(folder / "store", bags, preprocessing={"windows": [[-100, 300], None]})
    return manifest
