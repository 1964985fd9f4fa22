"""How many scans were predicted, in the words that the command, index.html and summary.json share.

    predicted   the scan has a probability
    refused     the model was not made for the scan; --force predicts it
    failed      the scan cannot be read or processed
    lacks       what a predicted scan lacks of the results that were asked for: its picture, its DICOM results

`nguide predict` ends with 0 if all scans are predicted and none lacks anything, otherwise with 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

STATES = ("predicted", "refused", "failed")
"""The states of a scan in a summary."""

Line = Mapping[str, Any]
"""A line of a summary: `scan_id`, `state`, `lacks` and `reason` are read here; lines of one scan count once."""


def count_states(lines: Iterable[Line]) -> dict[str, int]:
    """The number of scans in each state."""
    counts = Counter(line["state"] for line in _one_a_scan(lines))
    return {state: counts[state] for state in STATES}


def count_sentence(lines: Iterable[Line]) -> str:
    """The numbers of scans, without a full stop."""
    scans = _one_a_scan(lines)
    counts = count_states(scans)
    done, *others = (f"{counts[state]} {state}" for state in STATES if state == STATES[0] or counts[state])
    said = [", ".join([done.replace(" ", f" of {len(scans)} scans ", 1), *others])]
    for lacked in dict.fromkeys(line["lacks"] for line in scans if line.get("lacks")):
        reasons = [line["reason"] for line in scans if line.get("lacks") == lacked]
        verb = "lacks" if len(reasons) == 1 else "lack"
        instance = "" if len(set(reasons)) == 1 else "for instance: "
        said.append(f"{len(reasons)} {verb} {lacked} ({instance}{reasons[0]})")
    return "; ".join(said)


def is_all(lines: Iterable[Line]) -> bool:
    """Whether all scans are predicted and none lacks anything."""
    return all(line["state"] == STATES[0] and not line.get("lacks") for line in lines)


def _one_a_scan(lines: Iterable[Line]) -> list[Line]:
    return list({line["scan_id"]: line for line in lines}.values())
