"""The supervised references: how well linear models of the frozen embeddings do that are told the slices' labels.

They are the tables' last row for CT data, where nobody knows the best possible: the slice reference (a convolution
along the slices, then a linear layer) for localization, the scan reference (logistic regression on the mean of the
positive slices) for scans.  Both are trained over the paper's grid by the engine that trains the methods.  The paper
calls them ceilings, but its own methods beat them in two cells: trained by gradient descent, they bound nothing.

The scan reference is told the positive slices even of the test scans.  A positive scan without a slice labelled
positive (its labels are unknown, or all negative) tells nothing to pool: it is left out of the scan reference, in every
part, and counted.  The slice reference leaves out slices of unknown label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.blocks import block_statistics
from normal_guidance.core.method_names import SLICE_REFERENCE
from normal_guidance.errors import UserError
from normal_guidance.evaluation.runs import Data, Run, run_sweep
from normal_guidance.statistics.scores import Scores
from normal_guidance.training.batches import slice_labels_of
from normal_guidance.training.config import Config, grid
from normal_guidance.training.progress import SweepProgress
from normal_guidance.training.sweep import Execution

MakeGrid = Callable[[Config], Sequence[Config]]


@dataclass(frozen=True)
class References:
    """Both supervised references of one split."""

    slices: Run
    scans: Run

    @property
    def scores(self) -> Scores | None:
        """The tables' last row: localization of the slice reference, scan scores of the scan reference.

        None where one of them selected no epoch.
        """
        if not (self.slices.winners and self.scans.winners):
            return None
        on_slices, on_scans = (run.winners[0].test for run in (self.slices, self.scans))
        if on_slices is None or on_scans is None:
            return None
        return replace(on_slices, scan_auroc=on_scans.scan_auroc, scan_auprc=on_scans.scan_auprc)


def run_slice_reference(
    folder: str | Path,
    train: Data,
    val: Data,
    test: Data,
    protocol: Config,
    execution: Execution | None = None,
    *,
    receptive_field: int | None = None,
    make_grid: MakeGrid = grid,
    options: Mapping[str, Any] | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Run:
    """Train the slice reference in a run folder.

    AUROC in its history is that of all slices of a part together, and chooses the winner.  In its predictions
    `attention` is each slice's probability, `log_attention` its logit, and scans have no logit (NaN).

    Args:
        protocol: how to train, and the seed; its method does not matter.
        receptive_field: R; the mean length of the training scans' positive blocks if left out.
        make_grid: the configurations to train, made from one; the paper's 32.
        options: copied to the report, which adds what is particular to the reference.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> train, val, test = (shifted_mean(64, seed, features=8, shift=3.0) for seed in (1, 2, 3))
        >>> protocol = Config("mean", epochs=20, batch_size=16, train_above_val=False)
        >>> with TemporaryDirectory() as folder:
        ...     slices = run_slice_reference(Path(folder, "slices"), train, val, test, protocol)
        ...     scans = run_scan_reference(Path(folder, "scans"), train, val, test, protocol)
        >>> slices.report["options"]
        {'reference': 'slices', 'receptive_field': 12, 'receptive_field_given': False}
        >>> both = References(slices, scans).scores
        >>> both.localization_auroc > 0.9, both.scan_auroc > 0.9
        (True, True)
    """
    config = slice_reference_config(protocol, train, receptive_field)
    about = {
        "reference": "slices",
        "receptive_field": config.receptive_field,
        "receptive_field_given": receptive_field is not None,
    }
    configs = make_grid(config)
    return run_sweep(folder, configs, train, val, test, execution, options={**(options or {}), **about}, watch=watch)


def slice_reference_config(protocol: Config, train: Data, receptive_field: int | None = None) -> Config:
    """The protocol for the slice reference: R is given, or the mean length of the training scans' positive blocks.

    Example:
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> slice_reference_config(Config("ng", epochs=5), shifted_mean(9, seed=1, features=2)).receptive_field
        12
    """
    if receptive_field is None:
        receptive_field = block_statistics(slice_labels_of(train), train.lengths).receptive_field
    return replace(protocol, method=SLICE_REFERENCE, receptive_field=receptive_field).without_idle_guides()


def run_scan_reference(
    folder: str | Path,
    train: Data,
    val: Data,
    test: Data,
    protocol: Config,
    execution: Execution | None = None,
    *,
    make_grid: MakeGrid = grid,
    options: Mapping[str, Any] | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Run:
    """Train the scan reference in a run folder; arguments as for `run_slice_reference`.

    It is mean pooling of `oracle_pooled` scans, so its configurations say `mean` and its scans have one row each.
    """
    parts = {"train": train, "val": val, "test": test}
    pooled = {part: oracle_pooled(scans, protocol.seed) for part, scans in parts.items()}
    left_out = {part: len(scans) - len(pooled[part]) for part, scans in parts.items()}
    about = {"reference": "scans", "left_out": left_out}
    configs = make_grid(replace(protocol, method="mean", receptive_field=None).without_idle_guides())
    return run_sweep(
        folder,
        configs,
        pooled["train"],
        pooled["val"],
        pooled["test"],
        execution,
        options={**(options or {}), **about},
        watch=watch,
    )


# ----------------------------------------------------------------------------------------------------
# Pooling by slice labels
# ----------------------------------------------------------------------------------------------------


def oracle_pooled(scans: Data, seed: int) -> Bags:
    """Each scan as one row: the mean of its positive slices.

    A negative scan borrows the slice labels of a random positive scan, resampled to its length: if it were pooled over
    all slices, where in the body the slices lie would tell the classes apart.  Borrowed labels without a positive slice
    are drawn again.  Positive scans without a positive slice are left out, as are negative ones (of a slice or two)
    that no scan's labels fit.

    Only one scan's features are in memory at a time.

    Example:
        >>> lengths, labels = torch.tensor([3, 2]), torch.tensor([1, 0])
        >>> features = torch.tensor([[1.0], [2.0], [4.0], [5.0], [7.0]])
        >>> bags = Bags(features, lengths, labels, torch.tensor([0, 1, 1, 0, 0]))
        >>> oracle_pooled(bags, seed=1).features.flatten().tolist()
        [3.0, 7.0]
    """
    dtype = torch.promote_types(scans.dtype, torch.float32)  # a mean of half-precision numbers is not one itself
    own = [labels == 1 for labels in slice_labels_of(scans).cpu().split(scans.lengths.tolist())]
    donors = [positive for positive in own if positive.any()]
    if not donors:
        raise UserError(f"none of {len(own)} scans has a slice labelled positive; the scan reference needs some")
    generator, kept, rows = torch.Generator().manual_seed(seed), [], []
    for number, label in enumerate(scans.labels.tolist()):
        positive = own[number] if label else _borrowed(donors, len(own[number]), generator)
        if positive is not None and positive.any():
            features = scans.rows(torch.tensor([number]))
            rows.append(features[positive.to(features.device)].to(dtype).mean(0))
            kept.append(number)
    return Bags(
        features=torch.stack(rows),
        lengths=torch.ones(len(kept), dtype=torch.int64),
        labels=scans.labels[kept].cpu(),
        scan_ids=tuple(scans.scan_ids[number] for number in kept),
        patient_ids=tuple(scans.patient_ids[number] for number in kept),
    )


def _borrowed(
    donors: Sequence[Bool[Tensor, "_"]], length: int, generator: torch.Generator
) -> Bool[Tensor, "slices"] | None:
    """Labels of a random donor at this length, some positive; None if no donor has such.

    The first donor that fits, in random order, is as likely any of those that fit as drawing until one does.
    """
    for number in torch.randperm(len(donors), generator=generator).tolist():
        labels = donors[number][resampled(len(donors[number]), length)]
        if labels.any():
            return labels
    return None


def resampled(length: int, wanted: int) -> Int[Tensor, "wanted"]:
    """Which of `length` slices stand for `wanted` ones, evenly spread, the ends included.

    Example:
        >>> resampled(5, 3).tolist(), resampled(3, 5).tolist()
        ([0, 2, 4], [0, 0, 1, 2, 2])
    """
    return torch.linspace(0, length - 1, wanted, dtype=torch.float64).round().long()
