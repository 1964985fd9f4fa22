"""Make the dataset of a study from feature stores and splits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normal_guidance.data.manifest import PARTS
from normal_guidance.errors import UserError
from normal_guidance.evaluation.study import DATASETS, StudyData
from normal_guidance.features.store import FeatureStore, open_store

SPLIT_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class StoredParts:
    """Opens the scans of a seed and part on demand, also in another process or on another machine."""

    sources: Mapping[int, tuple[Path, Path | None]]
    """The store of each seed, and its table of parts; None for the parts that the store records."""

    def __call__(self, seed: int, part: str) -> FeatureStore:
        return self.store(seed).part(part)

    def store(self, seed: int) -> FeatureStore:
        """Return all scans of a split, with its parts."""
        folder, split = self.sources[seed]
        store = open_store(folder)
        return store if split is None else store.with_parts(split)


def stored_dataset(stores: Sequence[Path], splits: Sequence[Path] = (), name: str | None = None) -> StudyData:
    """Return a dataset of one store and several splits of it, or of one store for each split.

    Args:
        stores: one for all splits, or one for each: features normalised with a split's training scans belong to that
            split only.
        splits: tables (scan_id, part), or folders of such; without any, the parts that each store records are a split.
        name: the paper's name ("head-ct", "chest-ct", "abdomen-ct"), for its numbers beside ours, or any other.
            Default: the name of the first store's folder.

    A split's seed is the number at the end of its file's name (split-1001.csv); unless all names end in different
    numbers, splits are numbered from 1.
    """
    tables: list[Path | None] = [*_tables(splits)]
    if not stores:
        raise UserError("no store is given; give the folder of one")
    if not tables:
        tables = [None] * len(stores)
    if len(stores) not in (1, len(tables)):
        raise UserError(
            f"{len(stores)} stores and {len(tables)} splits; give one store for all splits, or one for each"
        )
    folders = list(stores) if len(stores) == len(tables) else list(stores) * len(tables)
    _refuse_doubles([table or folder for folder, table in zip(folders, tables, strict=True)])
    seeds = _seeds([table or folder for folder, table in zip(folders, tables, strict=True)])
    given = StoredParts(dict(zip(seeds, zip(folders, tables, strict=True), strict=True)))
    parts = {(seed, part): scans for seed in seeds for part, scans in _parts(given, seed).items()}
    labelled = {key for key, scans in parts.items() if _has_positive_slices(scans)}
    # Paths are absolute from here on: a cluster's processes start in other folders.
    whole = {seed: (folder.resolve(), table and table.resolve()) for seed, (folder, table) in given.sources.items()}
    return StudyData(
        name=_name(name, folders[0]),
        draw=StoredParts(whole),
        seeds=tuple(seeds),
        oracle=None,
        has_slice_labels=all((seed, "test") in labelled for seed in seeds),
        has_supervision=len(labelled) == len(parts),
        fingerprints={key: scans.fingerprint for key, scans in parts.items()},
    )


def _name(name: str | None, folder: Path) -> str:
    chosen = name or folder.resolve().name
    if chosen in DATASETS:
        raise UserError(
            f"dataset {chosen!r} is drawn, not stored: run nguide reproduce {chosen}, or give the store another name "
            "(--dataset)"
        )
    return chosen


def _refuse_doubles(paths: Sequence[Path]) -> None:
    """Refuse a split that is given twice: it would make intervals too narrow."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice; give each split once")
        seen.add(path.resolve())


def _tables(splits: Sequence[Path]) -> list[Path]:
    """Return the given files, and the files of given folders in the order of their names."""
    tables = []
    for path in splits:
        inside = sorted(file for file in path.glob("*") if file.suffix in SPLIT_SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path} holds no split ({', '.join(SPLIT_SUFFIXES)}); make some with nguide split")
        tables += inside
    return tables


def _seeds(paths: Sequence[Path]) -> list[int]:
    found = [re.search(r"(\d+)$", path.stem) for path in paths]
    numbers = [int(one.group()) for one in found if one]
    return numbers if len(set(numbers)) == len(paths) else list(range(1, len(paths) + 1))


def check_parts(store: FeatureStore, source: Path, needed: Sequence[str]) -> set[str]:
    """Return the names of a store's parts; refuse a store without one of those needed, which `source` should name."""
    names = set(store.scans["part"].tolist())
    for part in needed:
        if part not in names:
            raise UserError(
                f"{source} has no scan in part {part!r}; give --split FILE, a table with the columns scan_id and part "
                "(train, val, test)"
            )
    return names


def _parts(draw: StoredParts, seed: int) -> dict[str, FeatureStore]:
    """Return the scans of each part; refuse a split that lacks a part."""
    folder, split = draw.sources[seed]
    store = draw.store(seed)
    check_parts(store, split or folder, PARTS)
    return {part: store.part(part) for part in PARTS}


def _has_positive_slices(scans: FeatureStore) -> bool:
    return scans.slice_labels is not None and bool((scans.slice_labels == 1).any())
