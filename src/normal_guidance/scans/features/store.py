"""The feature store: a folder of features that training reads memory-mapped, without loading it.

    store.json                   format, number of features, dtype, provenance, recipe, fingerprint, findings
    index.parquet                one row per scan: ids, label, part, place of its slices, their checksum; two more
                                 columns for each finding but the first
    features-00000.safetensors   one tensor `features`, (slices, features); a scan never spans two shards; the
                                 metadata contain the recipe, too

The recipe is a hash of what turned scans into features: the encoder's weights and the preprocessing.  Opening reads the
index and the shards' headers; features are read from the disk when `FeatureStore.rows` first touches them, and stay in
the system's cache, which all processes share: a first pass over a cold disk runs at the disk's speed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Float, Int, Int8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normal_guidance.base.errors import UserError, both_sides, choose_one_of, reading, shorten
from normal_guidance.base.files import (
    folder_atomically,
    read_json_as,
    sync,
    write_atomically,
    write_json,
    write_parquet,
)
from normal_guidance.base.records import Between
from normal_guidance.base.tables import read_columns, refuse_rows
from normal_guidance.base.tensor_files import DTYPE_NAMES, raw_bytes
from normal_guidance.core.bags import UNKNOWN, Bag, Bags, number_of_scan, sizes_in_words
from normal_guidance.scans.features.preprocessing import scans_behind
from normal_guidance.scans.features.store_place import ABOUT, check_store
from normal_guidance.scans.index.manifest import (
    PARTS,
    Finding,
    Labels,
    check_labels,
    choose_finding,
    columns_of,
    further_columns,
    label_column,
    read_findings,
    slices_column,
    with_findings,
)
from normal_guidance.scans.index.splits import read_parts, refuse_overlap
from normal_guidance.show.html import notebook_html

DtypeName = Literal["float16", "bfloat16", "float32", "float64"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

HEADER_BYTES = 4096
"""Bytes reserved for a shard's header, padded with spaces, so that its features start at a page of memory."""

SHARD_BYTES = 2**30  # largest shard, unless one scan alone is larger: such files are easy to copy and to map

LACKING = "lacking"
"""The number in a store's provenance of scans that its index has and the store does not; absent if it has all."""

AGAIN = "copy the store again, or write it again"  # the advice for files that are damaged or do not fit together


class IndexRow(NamedTuple):
    """One scan in index.parquet, with the types of its columns."""

    scan_id: Annotated[str, pa.string()]
    patient_id: Annotated[str, pa.string()]
    label: Annotated[int, pa.int8()]
    shard: Annotated[int, pa.int32()]
    first_row: Annotated[int, pa.int64()]
    slices: Annotated[int, pa.int32()]
    slice_labels: Annotated[Int8[np.ndarray, "slices"] | None, pa.list_(pa.int8())]
    part: Annotated[str | None, pa.string()]
    sha256: Annotated[str, pa.string()]


_TYPES = get_type_hints(IndexRow, include_extras=True)
INDEX = pa.schema([(name, kind.__metadata__[0]) for name, kind in _TYPES.items()])


def fingerprint_rows(rows: Iterable[IndexRow], features: int, dtype: torch.dtype) -> str:
    """SHA-256 of the scans, independent of their order and of their place in the store; of features, their SHA-256."""
    digest = hashlib.sha256(json.dumps([features, dtype_name(dtype)]).encode())
    for row in sorted(rows, key=lambda row: row.scan_id):
        slice_labels = None if row.slice_labels is None else row.slice_labels.tolist()
        identity = [row.scan_id, row.patient_id, row.label, row.part, slice_labels, row.sha256]
        digest.update(b"\n" + json.dumps(identity).encode())
    return digest.hexdigest()


def read_store_file(folder: Path) -> StoreFile:
    """Reads store.json and checks that this version can read the store."""
    check_store(folder)
    path = folder / ABOUT
    file = read_json_as(path, StoreFile, AGAIN)
    with reading(path, AGAIN):
        scans_behind(file.provenance)
        read_findings(file.findings)
    return file


@dataclass(frozen=True)
class StoreFile:
    """The types of store.json; without findings there is no list of them."""

    features: Annotated[int, Between(1.0, 2.0**31)]
    dtype: DtypeName
    provenance: dict[str, Any]
    recipe: str
    fingerprint: str
    findings: list[Any] = field(default_factory=list)


def _read_index(folder: Path, findings: Sequence[Finding]) -> pd.DataFrame:
    """Reads index.parquet: the columns of `INDEX` and of the findings, null as None, but NaN for a label."""
    path, further = folder / "index.parquet", columns_of(findings)
    nullable = ("slice_labels", "part", *further, *further.values())
    table = read_columns(path, with_findings(INDEX, findings), AGAIN, nullable)
    # Values that no store has are refused before files are looked for by them.
    refuse = partial(refuse_rows, path, table, again=AGAIN)
    if not table.num_rows:
        raise UserError(f"{path} is damaged: it lists no scan; {AGAIN}")
    for name, least, most in (("slices", 1, 2**31), ("shard", 0, table.num_rows - 1), ("first_row", 0, 2**48)):
        values = table[name].cast(pa.int64())
        refuse(pc.or_(pc.less(values, least), pc.greater(values, most)), f"has an impossible {name}")
    known = pc.is_in(table["part"], pa.array(PARTS))
    refuse(pc.and_(pc.is_valid(table["part"]), pc.invert(known)), "has an unknown part")
    check_labels(path, table, findings, table["slices"], 0, AGAIN)
    scans: pd.DataFrame = table.to_pandas()
    # A null in a column of strings would become NaN in pandas 3.
    return scans.assign(part=pd.Series(table["part"].to_pylist(), dtype=object))


def index_rows(scans: pd.DataFrame) -> list[IndexRow]:
    return [IndexRow(*values) for values in zip(*(scans[name].tolist() for name in IndexRow._fields), strict=True)]


def write_shards(
    folder: Path, scans: Iterable[tuple[IndexRow, Tensor]], shard_bytes: int, recipe: str
) -> tuple[list[IndexRow], int, torch.dtype]:
    """Writes all scans in order; returns their rows with shard and first row, the number of features and the dtype."""
    rows: list[IndexRow] = []
    shard, end = -1, 0
    features = torch.empty(0, 0)
    with ExitStack() as opened:
        for row, features in scans:
            if shard < 0 or (end + row.slices) * features.shape[1] * features.itemsize > shard_bytes:
                opened.close()
                shard, end = shard + 1, 0
                path = shard_path(folder, shard)
                file = opened.enter_context(_shard_file(path, features.shape[1], features.dtype, recipe))
            file.write(raw_bytes(features))
            rows.append(row._replace(shard=shard, first_row=end))
            end += row.slices
    return rows, features.shape[1], features.dtype


@contextmanager
def _shard_file(path: Path, features: int, dtype: torch.dtype, recipe: str) -> Iterator[BinaryIO]:
    """A safetensors file to append slices to; safetensors' own writer would need a whole shard in memory."""
    with path.open("xb") as file:
        file.seek(HEADER_BYTES)
        yield file
        size = file.tell() - HEADER_BYTES
        slices = size // (features * dtype.itemsize)
        tensor = {"dtype": DTYPE_NAMES[dtype], "shape": [slices, features], "data_offsets": [0, size]}
        header = {"__metadata__": {"recipe": recipe}, "features": tensor}
        length, text = HEADER_BYTES - 8, json.dumps(header).encode()  # 8 bytes hold this length
        if len(text) > length:
            raise UserError(f"recipe {recipe[:50]!r}... has {len(recipe)} characters; give a hash, such as sha256")
        file.seek(0)
        file.write(length.to_bytes(8, "little") + text.ljust(length))
        sync(file)


def map_shards(folder: Path, scans: pd.DataFrame, file: StoreFile) -> tuple[Tensor, ...]:
    """Maps the features of all shards, after checking that the files fit the index and store.json."""
    first_row = scans.groupby("shard")["slices"].cumsum() - scans["slices"]
    if wrong := scans["scan_id"][first_row != scans["first_row"]].tolist():
        raise UserError(f"{folder}: in index.parquet, scan {wrong[0]!r} does not follow the scan before it; {AGAIN}")
    slices = scans.groupby("shard")["slices"].sum().reindex(range(int(scans["shard"].max()) + 1), fill_value=0)
    return tuple(
        _map_shard(shard_path(folder, number), (count, file.features), file)
        for number, count in enumerate(slices.tolist())
    )


def _map_shard(path: Path, shape: tuple[int, int], file: StoreFile) -> Float[Tensor, "slices features"]:
    """One shard as a view of the mapped file; a page is read when it is first touched."""
    try:
        with safe_open(path, framework="pt") as opened:
            shard: Tensor = opened.get_tensor("features")
            recipe = (opened.metadata() or {}).get("recipe", "")
    except (OSError, SafetensorError) as error:
        if not path.exists():
            raise UserError(f"{path} is missing; {AGAIN}") from error
        what = "cannot be read" if isinstance(error, OSError) else "is damaged"
        raise UserError(f"{path} {what} ({shorten(str(error), 300)}); {AGAIN}") from error
    if recipe != file.recipe:
        raise UserError(
            f"{path} was made by another encoder or preprocessing than the store (recipe {recipe[:12] or 'unknown'}, "
            f"not {file.recipe[:12] or 'unknown'}); features of two recipes must not be mixed: {AGAIN}"
        )
    if (tuple(shard.shape), shard.dtype) != (shape, DTYPES[file.dtype]):
        raise UserError(
            f"{path} holds {tuple(shard.shape)} numbers of {dtype_name(shard.dtype)}, but the index needs {shape} of "
            f"{file.dtype}; {AGAIN}"
        )
    return shard


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in store.json: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"features-{number:05d}.safetensors"


@dataclass(frozen=True, eq=False, repr=False)
class FeatureStore:
    """The scans of a store, or some of them; features stay on the disk until they are needed.

    Args:
        folder: where the store lies.
        scans: one row per scan, the columns of `INDEX`.
        width: features per slice.
        dtype: number format of the features.
        provenance: how the features were made, as given to `write_store`.
        recipe: a hash of the encoder and the preprocessing; empty if unknown.
        shards: the memory-mapped features, all of them.
        findings: what the scans are labelled for, the label's own first; empty for one label without a name.
        verify: whether the features of a scan are compared with their checksum when they are first read.
        verified: place of every scan that was, shared by all views of the store.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> train = Bags(torch.randn(5, 8), torch.tensor([2, 3]), torch.tensor([0, 1]), scan_ids=("A17", "B02"))
        >>> val = Bags(torch.randn(4, 8), torch.tensor([4]), torch.tensor([1]), scan_ids=("C33",))
        >>> parts = {"train": train, "val": val}
        >>> with TemporaryDirectory() as folder:
        ...     store = write_store(f"{folder}/store", parts.items(), provenance={"encoder": "noise"})
        >>> store
        FeatureStore(3 scans of 2-4 slices (median 3), 9 slices x 8 features, 2 positive (66.7 %), train 2, val 1,
        float32, 288 bytes)
        >>> torch.equal(store.part("train").rows(torch.tensor([1])), train[1].features)
        True
        >>> store.fingerprint == fingerprint_of(parts)
        True
    """

    folder: Path
    scans: pd.DataFrame
    width: int
    dtype: torch.dtype
    provenance: Mapping[str, Any]
    recipe: str
    shards: tuple[Float[Tensor, "_ features"], ...]
    findings: tuple[Finding, ...] = ()
    verify: bool = True
    verified: set[tuple[int, int]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, scan: int | str) -> Bag:
        """One scan, by its number from 0 or by its id; `select` chooses several."""
        number = number_of_scan(scan, self.scan_ids, f"store {self.folder}")
        known: Any = self.scans["slice_labels"].iat[number]
        names = self.scan_ids[number], self.patient_ids[number]
        return Bag(self.rows(torch.tensor([number])), int(self.labels[number]), known, *names)

    def __iter__(self) -> Iterator[Bag]:
        return (self[number] for number in range(len(self)))

    def to_pandas(self) -> pd.DataFrame:
        """One row a scan: ids, label, slices, part, and how many slices are positive, where that is known."""
        known = [None if labels is None else int((labels == 1).sum()) for labels in self.scans["slice_labels"]]
        table = self.scans[["scan_id", "patient_id", "label", "slices", "part"]]
        return table.assign(positive_slices=pd.Series(known, dtype="Int64"))

    def _repr_html_(self) -> str:
        return notebook_html([repr(self)], self.to_pandas())

    @property
    def slice_spacing(self) -> float | None:
        """The median distance of slices in mm; None where the encoded scans do not tell, or features were imported."""
        summary = scans_behind(self.provenance)
        return None if summary is None or summary.slice_spacing is None else summary.slice_spacing.median

    def part(self, name: str) -> FeatureStore:
        """The scans of one part: 'train', 'val' or 'test'."""
        choose_one_of("part", name, PARTS)
        chosen = (self.scans["part"] == name).to_numpy()
        if not chosen.any():
            raise UserError(f"store {self.folder} has no scan of part {name!r}; assign parts with with_parts(table)")
        return self._view(self.scans[chosen])

    def select(
        self, chosen: Sequence[str] | Sequence[bool] | Bool[Tensor, "scans"] | np.ndarray | pd.Series
    ) -> FeatureStore:
        """The scans of the given ids, in that order, or those for which a boolean is True.

        `store.select(store.scans.label == 1)` selects the positive scans.
        """
        wanted = np.atleast_1d(np.asarray(chosen))  # a single id is allowed, too
        if wanted.dtype == bool:
            if wanted.shape != (len(self),):
                raise UserError(f"{len(wanted)} booleans for {len(self)} scans; give one per scan")
            return self._view(self.scans[wanted])
        ids = [str(scan) for scan in wanted.tolist()]
        if twice := [scan for scan, count in Counter(ids).items() if count > 1]:
            raise UserError(f"the selection from store {self.folder} has scan {twice[0]!r} twice; give each scan once")
        number_of = {scan: number for number, scan in enumerate(self.scan_ids)}
        if unknown := [scan for scan in ids if scan not in number_of]:
            raise UserError(
                f"store {self.folder} has no scan {unknown[0]!r} ({len(unknown)} such ids); store.scans lists the ids"
            )
        return self._view(self.scans.iloc[[number_of[scan] for scan in ids]])

    def with_parts(self, parts: str | Path | Mapping[str, str]) -> FeatureStore:
        """The same scans with other parts, from a mapping of scan ids or a .csv or .parquet with `scan_id`, `part`.

        Every scan needs a part, and all scans of a patient the same one: a model must not be tested on a patient that
        it was trained on.  The folder does not change.
        """
        where = "the mapping" if isinstance(parts, Mapping) else str(parts)
        part_of = dict(parts) if isinstance(parts, Mapping) else read_parts(Path(parts), self)
        for scan, name in part_of.items():
            choose_one_of(f"{where}: scan {scan!r}: part", name, PARTS)
        have, given = set(self.scan_ids), set(part_of)
        for scans, problem, action in (
            (given - have, "is not in the store", "leave it out, or select the scans later"),
            (have - given, "is in the store, but has no part", "add it, or select the other scans first"),
        ):
            if scans:
                sides = both_sides(where, given, "the store", have)
                raise UserError(f"{where}: scan {min(scans)!r} {problem} ({len(scans)} such scans); {action} ({sides})")
        names = [part_of[scan] for scan in self.scan_ids]
        refuse_overlap(self.patient_ids, names, "patient")
        return self._view(self.scans.assign(part=pd.Series(names, dtype=object, index=self.scans.index)))

    @property
    def finding(self) -> Finding | None:
        """The finding that `labels` and `slice_labels` are of; None where it has no name."""
        return self.findings[0] if self.findings else None

    def of_finding(self, name: str) -> FeatureStore:
        """The scans with the labels of one finding, without those for which it is unknown; features are not copied."""
        finding = choose_finding(self.findings, name, f"store {self.folder}")
        scans, columns = self.scans, columns_of(self.findings)
        if finding != self.findings[0]:
            scans = scans[scans[label_column(name)].notna()]
            labels = scans[label_column(name)].astype(np.int8)
            scans = scans.assign(label=labels, slice_labels=scans[slices_column(name)])
        if not len(scans):
            raise UserError(f"store {self.folder} has no label of finding {name!r} for these scans; choose another")
        return replace(self._view(scans.drop(columns=[*columns, *columns.values()])), findings=(finding,))

    def rows(self, scan_numbers: Int[Tensor, "chosen"]) -> Float[Tensor, "slices features"]:
        """The slices of some scans, one scan below the other: a copy, and nothing else is read from the disk.

        Safe to call from several threads, and made for it: one copy for all scans, without Python's lock, which a busy
        training loop would give back only every 5 ms.

        Features that are damaged or not finite are refused, when a scan is first read.
        """
        numbers = scan_numbers.tolist()
        self._refuse_damage(numbers)
        chosen = [self._features_of[number] for number in numbers]
        return torch.cat(chosen) if chosen else torch.empty(0, self.width, dtype=self.dtype)

    def bags(self) -> Bags:
        """All scans, loaded into memory and checked by `Bags`."""
        return Bags(
            features=self.rows(torch.arange(len(self))),
            lengths=self.lengths,
            labels=self.labels,
            slice_labels=self.slice_labels,
            scan_ids=self.scan_ids,
            patient_ids=self.patient_ids,
        )

    def damaged(self) -> list[str]:
        """The scans whose features are not those that were written; reads and hashes all features."""
        self._refuse_truncated({shard for shard, _ in self._places})
        return [scan for number, scan in enumerate(self.scan_ids) if self._is_damaged(number)]

    def _refuse_damage(self, numbers: Sequence[int]) -> None:
        """Checks scans before they are read: their files every time, their features the first time."""
        places = self._places
        self._refuse_truncated({places[number][0] for number in numbers})
        for number in numbers if self.verify else ():
            if places[number] in self.verified:
                continue
            scan = self.scan_ids[number]
            if self._is_damaged(number):
                raise UserError(f"store {self.folder}: the features of scan {scan!r} are damaged; {AGAIN}")
            if not self._features_of[number].isfinite().all():
                raise UserError(
                    f"store {self.folder}: scan {scan!r} has features that are NaN or infinite; leave it out, or make "
                    "its features again"
                )
            self.verified.add(places[number])

    def _is_damaged(self, number: int) -> bool:
        return _checksum(self._features_of[number]) != self.scans["sha256"].iat[number]

    def _refuse_truncated(self, shards: Iterable[int]) -> None:
        """Reading the missing end of a mapped file would end the process."""
        for shard in shards:
            path, needed = shard_path(self.folder, shard), self.shards[shard].nbytes
            with suppress(FileNotFoundError):  # what is mapped can still be read
                if path.stat().st_size < needed:
                    raise UserError(f"{path} has become shorter since the store was opened; {AGAIN}")

    @cached_property
    def lengths(self) -> Int[Tensor, "scans"]:
        """Slices per scan."""
        return torch.tensor(self.scans["slices"].tolist(), dtype=torch.int64)

    @cached_property
    def labels(self) -> Int[Tensor, "scans"]:
        """One 0 or 1 per scan."""
        return torch.tensor(self.scans["label"].tolist(), dtype=torch.int64)

    @cached_property
    def slice_labels(self) -> Int[Tensor, "slices"] | None:
        """One 0 or 1 per slice, `UNKNOWN` (-1) for the slices of a scan without; None if no scan has any."""
        known = self.scans["slice_labels"].tolist()
        if all(labels is None for labels in known):
            return None
        filled = [
            np.full(slices, UNKNOWN) if labels is None else labels
            for labels, slices in zip(known, self.scans["slices"].tolist(), strict=True)
        ]
        return torch.from_numpy(np.concatenate(filled).astype(np.int64))

    @cached_property
    def scan_ids(self) -> tuple[str, ...]:
        """Unique names of the scans."""
        return tuple(self.scans["scan_id"].tolist())

    @cached_property
    def patient_ids(self) -> tuple[str, ...]:
        """The patient of every scan."""
        return tuple(self.scans["patient_id"].tolist())

    @cached_property
    def fingerprint(self) -> str:
        """Identifies these scans (see `fingerprint_of`), without reading any feature; of findings, the first only."""
        return fingerprint_rows(index_rows(self.scans), self.width, self.dtype)

    @property
    def memory(self) -> int:
        """Bytes of features that `bags` would load."""
        return int(self.lengths.sum()) * self.width * self.dtype.itemsize

    def __repr__(self) -> str:
        if not len(self):
            return f"FeatureStore(no scans, {self.width} features, {dtype_name(self.dtype)})"
        labelled = sum(labels is not None for labels in self.scans["slice_labels"].tolist())
        counts = {name: int((self.scans["part"] == name).sum()) for name in PARTS}
        parts = [
            *sizes_in_words(self),
            *([f"{labelled} with slice labels"] if labelled else []),
            *([f"findings {' '.join(finding.name for finding in self.findings)}"] if self.findings else []),
            *(f"{name} {count}" for name, count in counts.items() if count),
            dtype_name(self.dtype),
            f"{self.memory:,} bytes",
        ]
        return f"FeatureStore({', '.join(parts)})"

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Shard and first row of every scan."""
        return list(zip(self.scans["shard"].tolist(), self.scans["first_row"].tolist(), strict=True))

    @cached_property
    def _features_of(self) -> list[Float[Tensor, "_ features"]]:
        """Every scan's slices as views of the mapped shards, made once, so that `rows` only copies."""
        places = zip(self._places, self.lengths.tolist(), strict=True)
        return [self.shards[shard].narrow(0, first, slices) for (shard, first), slices in places]

    def _view(self, scans: pd.DataFrame) -> FeatureStore:
        return replace(self, scans=scans.reset_index(drop=True))


def write_store(
    folder: str | Path,
    bags: Bags | Iterable[tuple[str | None, Bags]],
    *,
    provenance: Mapping[str, Any],
    recipe: str = "",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    findings: Sequence[Finding] = (),
    further: Mapping[str, Mapping[str, Labels]] | None = None,
    instead_of: Path | None = None,
) -> FeatureStore:
    """Writes scans to a new store and opens it.

    Args:
        folder: must not exist yet, or be empty.  It appears when it is complete.
        bags: the scans; or pairs of a part ('train', 'val', 'test' or None) and scans, drawn one by one, of which two
            at most are in memory.  Scan ids are unique over all pairs, and no patient is in two parts.
        provenance: how the features were made, as JSON values.
        recipe: a hash of the encoder and the preprocessing, which every file of the store contains.
        dtype: number format of the stored features; that of the scans if left out.
        shard_bytes: size from which a new file is started.
        files: contents of further files in the folder, by name, such as a report.
        findings: what the scans are labelled for; the labels of `bags` are those of the first.
        further: labels for the other findings, by scan and finding; read when all scans are written.
        instead_of: where an earlier store in the folder is moved when the new one is complete.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> bags = Bags(torch.randn(5, 8), torch.tensor([2, 3]), torch.tensor([0, 1]))
        >>> with TemporaryDirectory() as folder:
        ...     store = write_store(f"{folder}/store", bags, provenance={"encoder": "noise"}, dtype=torch.float16)
        ...     sorted(file.name for file in store.folder.iterdir())
        ['features-00000.safetensors', 'index.parquet', 'store.json']
    """
    if shard_bytes < 1:
        raise UserError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    try:  # at the start, not after hours of writing
        json.dumps(dict(provenance), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"provenance {provenance!r} is not JSON ({error}); give text, numbers, lists and mappings only"
        ) from error
    scans = _scans([(None, bags)] if isinstance(bags, Bags) else bags, dtype)
    with folder_atomically(folder, instead_of) as draft:
        rows, features, dtype = write_shards(draft, scans, shard_bytes, recipe)
        of_scan = further or {}
        lines = [{**row._asdict(), **further_columns(findings, of_scan.get(row.scan_id, {}))} for row in rows]
        write_parquet(draft / "index.parquet", pa.Table.from_pylist(lines, schema=with_findings(INDEX, findings)))
        content = {
            "features": features,
            "dtype": dtype_name(dtype),
            "provenance": dict(provenance),
            "recipe": recipe,
            "fingerprint": fingerprint_rows(rows, features, dtype),
            "findings": [finding.as_json() for finding in findings],
        }
        write_json(draft / ABOUT, {name: value for name, value in content.items() if name != "findings" or findings})
        for name, written in (files or {}).items():
            write_atomically(draft / name, written)
    return open_store(folder)


def fingerprint_of(bags: Mapping[str, Bags]) -> str:
    """The fingerprint of a store written from these parts: equal only for the same data and dtype, in any order."""
    scans = [(row, features.shape[1], features.dtype) for row, features in _scans(bags.items(), None)]
    return fingerprint_rows([row for row, *_ in scans], *scans[0][1:])


def _scans(
    parts: Iterable[tuple[str | None, Bags]], dtype: torch.dtype | None
) -> Iterator[tuple[IndexRow, Float[Tensor, "slices features"]]]:
    """Every scan's row of the index, its shard and first row still 0, and its features in the store's dtype."""
    part_of_scan: dict[str, str | None] = {}
    part_of_patient: dict[object, str] = {}
    first: tuple[str, int, torch.dtype] | None = None
    for part, bags in parts:
        if part is not None:
            choose_one_of("part", part, PARTS)
        if not len(bags):
            continue
        layout = (bags.scan_ids[0], bags.features.shape[1], dtype or bags.features.dtype)
        first = first or layout
        _check_layout(first, layout)
        if doubled := [scan for scan in bags.scan_ids if scan in part_of_scan]:
            raise UserError(
                f"scan {doubled[0]!r} of part {part!r} is already in part {part_of_scan[doubled[0]]!r} "
                f"({len(doubled)} such ids); give scan_ids that are unique over all parts"
            )
        part_of_scan |= dict.fromkeys(bags.scan_ids, part)
        if part is not None:
            refuse_overlap(bags.patient_ids, [part] * len(bags), "patient", part_of_patient)
        for bag in bags:
            features = _stored(bag, layout[2])
            labels = None if bag.slice_labels is None else bag.slice_labels.cpu().numpy().astype(np.int8)
            scan, patient, slices = str(bag.scan_id), str(bag.patient_id), len(features)
            yield IndexRow(scan, patient, bag.label, 0, 0, slices, labels, part, _checksum(features)), features
    if first is None:
        raise UserError("there is no scan to store; give at least one")


def _check_layout(first: tuple[str, int, torch.dtype], other: tuple[str, int, torch.dtype]) -> None:
    """Scans of a store have the same number of features and the same dtype."""
    (scan, features, dtype), name = other, dtype_name(other[2])
    if features != first[1]:
        raise UserError(
            f"scan {scan!r} has {features} features, but scan {first[0]!r} has {first[1]}; encode all scans with the "
            "same encoder, and give arrays as (slices, features): are they transposed?"
        )
    if dtype != first[2]:
        raise UserError(
            f"scan {scan!r} is {name}, but scan {first[0]!r} is {dtype_name(first[2])}; convert them to one dtype: "
            "bags.to(dtype=...)"
        )
    if name not in DTYPES:
        raise UserError(f"scan {scan!r} is {name}; a store holds {', '.join(DTYPES)}: convert with bags.to(dtype=...)")


def _stored(bag: Bag, dtype: torch.dtype) -> Float[Tensor, "slices features"]:
    """The features of a scan in the store's dtype, which must hold them."""
    features = bag.features.detach().to("cpu", dtype).contiguous()
    if not features.isfinite().all():
        if not bag.features.isfinite().all():
            raise UserError(f"scan {bag.scan_id!r} has features that are NaN or infinite; leave it out, or mend them")
        raise UserError(
            f"scan {bag.scan_id!r} has a feature of size {bag.features.abs().max().item():g}, too large for "
            f"{dtype_name(dtype)}; store bfloat16 or float32"
        )
    return features


def _checksum(features: Float[Tensor, "slices features"]) -> str:
    return hashlib.sha256(raw_bytes(features)).hexdigest()


def open_store(folder: str | Path) -> FeatureStore:
    """Opens a store: reads its index, checks that its files fit together, and maps its shards.

    Features are compared with their checksums when they are first read, unless the environment has NGUIDE_VERIFY=0.

    Example:
        >>> open_store("nowhere")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere is not a feature store: store.json is missing; give a folder
        made by nguide encode
    """
    if not isinstance(folder, str | Path):
        raise UserError(f"folder: got {type(folder).__name__}; give the path of a store, as nguide encode made it")
    folder = Path(folder)
    file = read_store_file(folder)
    findings, dtype = read_findings(file.findings), DTYPES[file.dtype]
    scans = _read_index(folder, findings)
    fingerprint = fingerprint_rows(index_rows(scans), file.features, dtype)
    if fingerprint != file.fingerprint:
        raise UserError(
            f"{folder}: index.parquet and store.json do not belong together (fingerprints {fingerprint[:12]} and "
            f"{file.fingerprint[:12]}); {AGAIN}"
        )
    shards = map_shards(folder, scans, file)
    verify = os.environ.get("NGUIDE_VERIFY") != "0"
    made = (file.features, dtype, file.provenance, file.recipe)
    return FeatureStore(folder, scans, *made, shards, findings, verify)
