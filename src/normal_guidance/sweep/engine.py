"""Two engines that train a stack of configurations for an epoch, with the same results.

`PackedEngine` runs anywhere.  `SlottedEngine` gives every batch the same number of rows, so that one step, recorded as
a CUDA graph, serves all of them; it can be compiled for long trainings.  Neither pads scans to the longest.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from normal_guidance.base.workers import in_background
from normal_guidance.core.bags import UNKNOWN, ScanSet
from normal_guidance.core.layout import Layout
from normal_guidance.core.metrics import MAX_CELLS, auroc
from normal_guidance.sweep.batches import (
    MOST_PLACES,
    PREFETCH,
    EpochPlan,
    Resident,
    Streamed,
    Targets,
    batched,
    in_batches,
    slice_labels_of,
)
from normal_guidance.sweep.config import Precision
from normal_guidance.sweep.stack import Parameters, Stack, balanced_weights, descend, initial_momenta

EVALUATION_BATCH = 256  # scans predicted together: four training batches, since no gradients are kept
ROW_QUANTUM = 64  # row counts are rounded up to a multiple of this, which matrix units need to run at full speed

MOST_NUMBERS = 2**31 - 1  # queries, keys and values of a batch: kernels count them in 32 bits within a configuration
RESIDENT_SHARE = 0.6  # share of the device's free memory that features may take; larger ones are streamed


def row_dtype(precision: Precision) -> torch.dtype:
    return {"float64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)


@contextlib.contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Within the context, float32 products run on TF32 units for tf32 and bf16, and are exact otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision in ("tf32", "bf16") else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Engine:
    """The state of training: parameters and momenta of all configurations, changed in place."""

    step_function: Callable[..., Tensor] = staticmethod(descend)
    compiled = False

    def __init__(self, stack: Stack, train: ScanSet, batch_size: int, precision: Precision) -> None:
        self.stack = stack
        self.precision = precision
        self.batch_size = batch_size
        self.device = stack.lr.device
        self.parameters = stack.initial_parameters()
        self.momenta = initial_momenta(self.parameters, stack.configs[0].optimizer)
        self.unpenalized = stack.configs[0].spec.unpenalized
        self.class_weights: Tensor | None = None
        if stack.configs[0].class_weights:
            labels = slice_labels_of(train) if stack.on_slices else train.labels
            self.class_weights = balanced_weights(labels).to(stack.lr)
        matrices = {name for name, p in self.parameters.items() if p.ndim == 3 and min(p.shape[1:]) > 1}
        self.weights = {
            name: (p.to(row_dtype(precision)) if name in matrices else p).detach().requires_grad_()
            for name, p in self.parameters.items()
        }  # the model's: the parameters themselves, or in bf16 a copy of each matrix, kept up to date
        self.copies = {name: w.detach() for name, w in self.weights.items() if w.dtype != self.parameters[name].dtype}

    def train_epoch(self, order: Int[Tensor, "scans"]) -> tuple[Float[Tensor, "configs"], Float64[Tensor, "configs"]]:
        """Train on the scans in this order, whole batches only.  Return mean loss, and AUROC of logits before steps."""
        raise NotImplementedError

    def evaluate(self) -> tuple[Float64[Tensor, "configs"], Float64[Tensor, "configs"]]:
        """Each configuration's AUROC and cross-entropy of the validation scans, or of all their slices together."""
        raise NotImplementedError

    def auroc(self, logits: Float[Tensor, "configs *targets"], labels: Int[Tensor, "*targets"]) -> Tensor:
        """Each configuration's AUROC of its targets: scans, or slices for a supervised reference."""
        if self.stack.on_slices:
            return slice_auroc(logits, labels)
        return auroc(logits.flatten(1), labels.flatten())

    def descend(self, gradients: Sequence[Tensor]) -> Float[Tensor, "configs"]:
        """Take a step, and return the value of the L1 term before it."""
        config = self.stack.configs[0]
        with torch.no_grad():
            return self.step_function(
                self.parameters,
                gradients,
                self.momenta,
                lr=self.stack.lr,
                l1=self.stack.l1,
                momentum=config.momentum,
                clip_norm=config.clip_norm,
                unpenalized=self.unpenalized,
                copies=self.copies,
                optimizer=config.optimizer,
                weight_decay=config.weight_decay,
            )

    @torch.no_grad()
    def refresh(self) -> None:
        for name, copy in self.copies.items():
            copy.copy_(self.parameters[name])


class PackedEngine(Engine):
    """Trains on packed batches that a thread reads ahead: no compiler, any device."""

    def __init__(self, stack: Stack, train: ScanSet, val: ScanSet, batch_size: int, precision: Precision) -> None:
        super().__init__(stack, train, batch_size, precision)
        self.train, self.val = train, val
        self.train_targets, self.val_targets = (Targets(part, on_slices=stack.on_slices) for part in (train, val))
        self.steps = len(train.lengths) // batch_size

    def time_step(self) -> float:
        """Seconds of a step on the first batch, without the optimizer's step; nothing is changed."""
        batch = torch.arange(self.batch_size)
        begin = time.perf_counter()
        for _ in range(2):  # the first one also loads libraries
            synchronize(self.device)
            begin = time.perf_counter()
            for _, rows, layout in self._read(self.train, [batch]):
                self._gradients(batch, rows, layout)
            synchronize(self.device)
        return time.perf_counter() - begin

    def saved_bytes(self, batch: Int[Tensor, "batch"]) -> int:
        """Memory of all that the forward pass of a batch keeps for the gradients."""
        kept: list[int] = []

        def count(tensor: Tensor) -> Tensor:
            kept.append(tensor.nbytes)
            return tensor

        for _, rows, layout in self._read(self.train, [batch]):
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                labels = self.train_targets.of(batch).to(self.device)
                self.stack.losses(self.weights, rows, layout, labels, self.class_weights)
        return sum(kept)

    def _gradients(self, batch: Tensor, rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        labels = self.train_targets.of(batch).to(self.device)
        loss, logits = self.stack.losses(self.weights, rows, layout, labels, self.class_weights)
        return loss.detach(), logits.detach(), torch.autograd.grad(loss.sum(), list(self.weights.values()))

    def train_epoch(self, order: Int[Tensor, "scans"]) -> tuple[Float[Tensor, "configs"], Float64[Tensor, "configs"]]:
        batches = order[: self.steps * self.batch_size].split(self.batch_size)
        losses, logits = [], []
        for batch, rows, layout in self._read(self.train, batches):
            loss, logit, gradients = self._gradients(batch, rows, layout)
            losses.append(loss + self.descend(gradients))
            logits.append(logit)
        labels = self.train_targets.of(torch.cat(batches)).to(self.device)
        return torch.stack(losses).mean(0), self.auroc(torch.cat(logits, 1), labels)

    @torch.no_grad()
    def evaluate(self) -> tuple[Float64[Tensor, "configs"], Float64[Tensor, "configs"]]:
        logits = [
            self.stack.logits(self.weights, rows, layout)
            for _, rows, layout in self._read(self.val, in_batches(self.val.lengths, EVALUATION_BATCH))
        ]
        labels = self.val_targets.of(torch.arange(len(self.val.lengths))).to(self.device)
        return self.auroc(torch.cat(logits, 1), labels), cross_entropy(torch.cat(logits, 1), labels)

    def _read(self, scans: ScanSet, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Layout]]:
        """Each batch's scan numbers, features and layout."""
        dtype = row_dtype(self.precision)
        features = in_background((scans.rows(batch).to(self.device, dtype) for batch in batches), PREFETCH)
        for batch, rows in zip(batches, features, strict=True):
            yield batch, rows, Layout.packed(scans.lengths[batch]).to(self.device)


class SlottedEngine(Engine):
    """Trains on batches with a fixed number of rows (`SlottedLayout`), on CUDA recorded as graphs.

    `rows` are the row counts to choose from, ascending: each batch takes the first that holds it.  Each has its own
    graph.  Features that do not fit the device are streamed, unless `streamed` decides.
    """

    def __init__(
        self,
        stack: Stack,
        train: ScanSet,
        val: ScanSet,
        batch_size: int,
        precision: Precision,
        rows: Sequence[int],
        *,
        streamed: bool | None = None,
    ) -> None:
        super().__init__(stack, train, batch_size, precision)
        self.streamed = streamed
        self.graphed = self.device.type == "cuda"
        if self.graphed and precision != "float64":
            from normal_guidance.sweep import descent_triton

            self.step_function = descent_triton.descend
        self.rows = tuple(rows)
        if 3 * self.rows[-1] * train.width > MOST_NUMBERS:
            raise RuntimeError(f"its kernels cannot count batches of {self.rows[-1]} slices x {train.width} features")
        self.longest = int(max(train.lengths.max(), val.lengths.max()))
        self.lengths = train.lengths.cpu()
        self.train = self._rows(train, self.rows[-1])
        steps = len(self.lengths) // batch_size
        first_epoch = torch.arange(steps * batch_size, device=self.device).reshape(steps, batch_size)
        self.plan = self.train.plan(first_epoch, self.rows[-1])
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.losses = torch.zeros(steps, len(stack.configs), device=self.device, dtype=stack.lr.dtype)
        shape = (steps, len(stack.configs), *self.plan.labels.shape[1:])
        self.logits = torch.zeros(shape, device=self.device, dtype=stack.lr.dtype)
        size = min(EVALUATION_BATCH, len(val.lengths), max(1, MOST_PLACES // self.longest))
        self.val_scans = batched(torch.arange(len(val.lengths)), size, filler=len(val.lengths))
        lengths = torch.cat([val.lengths.cpu(), torch.ones(1, dtype=torch.int64)])  # the filler has one row
        val_rows = _round_up(int(lengths[self.val_scans].sum(1).max()) + size)
        self.val = self._rows(val, val_rows)
        self.val_plan = self.val.plan(self.val_scans.to(self.device), val_rows)
        self.val_labels = self.val.targets(torch.arange(len(val.lengths), device=self.device))
        self._forward: Callable[..., tuple[Tensor, Tensor]] = self._losses
        self._predict: Callable[..., Tensor] = self._logits
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._val_logits: Tensor | None = None
        self._val_graph: torch.cuda.CUDAGraph | None = None
        self._pool: Any = None

    def prepare(self, rows: Sequence[int] = ()) -> None:
        """Record a step and an evaluation, so that what cannot run on this device fails here and not in training."""
        self.step.zero_()  # after an epoch it points behind the last batch
        if self.graphed:
            # Trial steps have the shortest scan only, which any number of rows holds; each epoch makes its own plan.
            shortest = torch.full_like(self.plan.lengths, int(self.lengths.argmin()))
            self.plan.copy_(self.train.plan(shortest, self.rows[-1]))
            for count in rows or self.rows[-1:]:
                self._graphs[count] = self._record(count)
        self.evaluate()

    def compile(self, *, every: bool = False) -> None:
        """Compile the step of `every` number of rows, or of the largest alone; after an error nothing is changed."""
        plain = {**vars(self)}
        torch.compiler.reset()  # code compiled by earlier engines is useless now, and counts against torch's limit
        self._forward = torch.compile(self._losses, fullgraph=True, dynamic=False)
        self._predict = torch.compile(self._logits, fullgraph=True, dynamic=False)
        self._graphs, self._val_graph, self.rows = {}, None, self.rows if every else self.rows[-1:]
        try:
            self.prepare(self.rows)
        except Exception:
            vars(self).update(plain)
            raise
        self.compiled = True

    def train_epoch(self, order: Int[Tensor, "scans"]) -> tuple[Float[Tensor, "configs"], Float64[Tensor, "configs"]]:
        steps, bags = self.plan.lengths.shape
        scans = order[: steps * bags].reshape(steps, bags)
        self.plan.copy_(self.train.plan(scans.to(self.device), self.rows[-1]))
        self.step.zero_()
        needed = (self.lengths[scans].sum(1) + bags).tolist()
        for least, _ in zip(needed, self.train.staged(scans), strict=True):
            rows = next(rows for rows in self.rows if rows >= least)
            if not self.graphed:
                self._train_step(rows)
                continue
            if rows not in self._graphs:
                self._graphs[rows] = self._record(rows)
            self._graphs[rows].replay()
        return self.losses.mean(0), self.auroc(self.logits.movedim(0, 1), self.plan.labels)

    @torch.no_grad()
    def evaluate(self) -> tuple[Float64[Tensor, "configs"], Float64[Tensor, "configs"]]:
        if not self.graphed or isinstance(self.val, Streamed):
            logits = self._predictions()
        else:
            if self._val_graph is None:
                self._predictions()  # compiles
                self._val_graph = torch.cuda.CUDAGraph()
                with self._capture(self._val_graph):
                    self._val_logits = self._predictions()
            self._val_graph.replay()
            assert self._val_logits is not None
            logits = self._val_logits
        logits = logits[:, : len(self.val_labels)]
        return self.auroc(logits, self.val_labels), cross_entropy(logits, self.val_labels)

    def _record(self, rows: int) -> torch.cuda.CUDAGraph:
        """Record the step as a graph; the trial steps for compiling and recording are undone afterwards."""
        state = [*self.parameters.values(), *self.momenta.values(), self.step, self.losses, self.logits]
        before = [tensor.detach().clone() for tensor in state]
        step = self.step.clone()
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._train_step(rows)
                    self.step.copy_(step)  # the next batch may need more rows, or not exist
            torch.cuda.current_stream().wait_stream(stream)
            with self._capture(graph):
                self._train_step(rows)
        finally:
            with torch.no_grad():
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)
            self.refresh()
        return graph

    def _capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        """Record into `graph`.  Graphs never overlap, so they share memory; a thread may copy batches meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")

    def _train_step(self, rows: int) -> None:
        plan = self.plan.narrow(rows)
        loss, logits = self._forward(self.weights, self.train.rows, plan, self.step)
        gradients = torch.autograd.grad(loss.sum(), list(self.weights.values()))
        self.losses[self.step] = (loss.detach() + self.descend(gradients))[None]
        self.logits[self.step] = logits.detach()[None]
        self.step += 1

    def _losses(self, parameters: Parameters, table: Tensor, plan: EpochPlan, step: Tensor) -> tuple[Tensor, Tensor]:
        source, layout, labels = plan.batch(step, self.longest)
        return self.stack.losses(parameters, table[source], layout, labels, self.class_weights)

    def _predictions(self) -> Tensor:
        steps = torch.arange(len(self.val_scans), device=self.device).split(1)
        parts = [
            self._predict(self.weights, self.val.rows, self.val_plan, step)
            for step, _ in zip(steps, self.val.staged(self.val_scans), strict=True)
        ]
        return torch.cat(parts, 1)

    def _logits(self, parameters: Parameters, table: Tensor, plan: EpochPlan, step: Tensor) -> Tensor:
        source, layout, _ = plan.batch(step, self.longest)
        return self.stack.logits(parameters, table[source], layout)

    def _rows(self, scans: ScanSet, most: int) -> Resident | Streamed:
        """The features: on the device if they fit, else streamed in batches of at most `most` rows."""
        dtype = row_dtype(self.precision)
        needed = int(scans.lengths.sum()) * scans.width * dtype.itemsize
        if self.streamed is None and self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            streamed = needed > RESIDENT_SHARE * (torch.cuda.mem_get_info(self.device)[0] + cached)
        else:
            streamed = bool(self.streamed)
        slices_to = self.longest if self.stack.on_slices else None
        if streamed:
            return Streamed(scans, self.device, dtype, most, slices_to)
        return Resident(scans, self.device, dtype, slices_to)


def cross_entropy(
    logits: Float[Tensor, "configs *targets"], labels: Int[Tensor, "*targets"]
) -> Float64[Tensor, "configs"]:
    """Mean binary cross-entropy of the targets with a known label."""
    logits, labels = logits.flatten(1), labels.flatten()
    known = labels != UNKNOWN
    each = torch.where(known, F.softplus(torch.where(labels == 1, -logits, logits)).double(), 0.0)
    return each.sum(1) / known.sum()


def slice_auroc(logits: Float[Tensor, "configs *slots"], labels: Int[Tensor, "*slots"]) -> Float64[Tensor, "configs"]:
    """AUROC of all slices with a known label together, for a few configurations at a time to limit memory."""
    labels = labels.flatten()
    known = (labels != UNKNOWN).nonzero().squeeze(1)
    together = max(1, MAX_CELLS // max(1, len(known)))
    return torch.cat([auroc(part.flatten(1)[:, known], labels[known]) for part in logits.split(together)])


def slot_numbers(
    lengths: Int[Tensor, "scans"], batch_size: int, orders: Iterator[Tensor], *, classes: int
) -> tuple[int, ...]:
    """Row counts for `SlottedEngine`: the largest batch of each of `classes` equal parts of all batches by size."""
    whole = len(lengths) // batch_size * batch_size
    totals = torch.cat([lengths[order[:whole]].reshape(-1, batch_size).sum(1) for order in orders])
    ascending = totals.sort().values
    largest = [ascending[math.ceil(part * len(ascending) / classes) - 1] for part in range(1, classes + 1)]
    return tuple(sorted({_round_up(int(value) + batch_size) for value in largest}))


def _round_up(rows: int) -> int:
    return -(-rows // ROW_QUANTUM) * ROW_QUANTUM
