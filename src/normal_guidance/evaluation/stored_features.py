"""A dataset from feature stores and splits, for a study."""

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
    """The scans of a seed and part, opened when they are asked for: also in another process, on another machine."""

    sources: Mapping[int, tuple[Path, Path | None]]
    """By seed: the store, and the table of its parts if they are not its own."""

    def __call__(self, seed: int, part: str) -> FeatureStore:
        return self.store(seed).part(part)

    def store(self, seed: int) -> FeatureStore:
        """All scans of a split, with its parts."""
        folder, split = self.sources[seed]
        store = open_store(folder)
        return store if split is None else store.with_parts(split)


def stored_dataset(stores: Sequence[Path], splits: Sequence[Path] = (), name: str | None = None) -> StudyData:
    """A dataset of one store and some splits of it, or of one store for each split.

    Args:
        stores: one for all splits, or one each: features that were normalised with a split's training scans are that
            split's own.
        splits: tables (scan_id, part), and folders of such; without any, each store's own parts are a split.
        name: as the paper calls it ("head-ct", "chest-ct", "abdomen-ct"), for its numbers beside ours; else the first
            store's own.

    A split's seed is the number that its file's name ends in (split-1001.csv), so that runs can be told apart; where
    not all names end in different numbers, splits are numbered from 1.

    Example:
        >>> stored_dataset([Path("nowhere")])
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere is not a feature store: store.json is missing; give a folder
        made by nguide encode
    """
    tables: list[Path | None] = [*_tables(splits)]
    if not stores:
        raise UserError("there is no store; give the folder of one")
    if not tables:
        tables = [None] * len(stores)
    if len(stores) not in (1, len(tables)):
        raise UserError(f"{len(stores)} stores and {len(tables)} splits; give one store for all splits, or one each")
    folders = list(stores) if len(stores) == len(tables) else list(stores) * len(tables)
    _refuse_doubles([table or folder for folder, table in zip(folders, tables, strict=True)])
    seeds = _seeds([table or folder for folder, table in zip(folders, tables, strict=True)])
    given = StoredParts(dict(zip(seeds, zip(folders, tables, strict=True), strict=True)))
    parts = {(seed, part): scans for seed in seeds for part, scans in _parts(given, seed).items()}
    labelled = {key for key, scans in parts.items() if _has_positive_slices(scans)}
    # From here on paths are whole: a cluster's processes start in other folders.
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
            f"dataset {chosen!r} is drawn, not stored, and its ceiling is known: nguide reproduce {chosen}; give a "
            "store another name (--dataset)"
        )
    return chosen


def _refuse_doubles(paths: Sequence[Path]) -> None:
    """A split that counts twice would make everything look surer than it is."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice; give each split once")
        seen.add(path.resolve())


def _tables(splits: Sequence[Path]) -> list[Path]:
    """The files, and those of folders in the order of their names."""
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


def _parts(draw: StoredParts, seed: int) -> dict[str, FeatureStore]:
    """The scans of each part; a split without one of its parts is refused."""
    folder, split = draw.sources[seed]
    store = draw.store(seed)
    names = set(store.scans["part"].tolist())
    for part in PARTS:
        if part not in names:
            raise UserError(
                f"no scan of {split or folder} is of part {part!r}; give --splits FILE, a table with the columns "
                "scan_id and part (train, val, test)"
            )
    return {part: store.part(part) for part in PARTS}


def _has_positive_slices(scans: FeatureStore) -> bool:
    return scans.slice_labels is not None and bool((scans.slice_labels == 1).any())
