"""Where and how a sweep computes: device, precision, and the engine, which a measurement chooses."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import is_out_of_memory, machine_memory
from normal_guidance.core.bags import ScanSet
from normal_guidance.sweep.batches import draw_orders, heaviest_batch
from normal_guidance.sweep.config import Config, Execution
from normal_guidance.sweep.engine import Engine, PackedEngine, SlottedEngine, slot_numbers, synchronize
from normal_guidance.sweep.stack import Stack

# Measured on an H200 (LOG.md, 2026-11-17): the most seconds to prepare the recorded step of a method that the card did
# not run before, and to compile it; a compiled step's time as a share of a recorded one's, and the part of it that more
# numbers of rows save, of which each is compiled again.
RECORDING_SECONDS, COMPILING_SECONDS = 8.0, 60.0
COMPILED_SHARE, FILLING_SHARE = 0.75, 0.07
MEMORY_SHARE = 0.6  # of the free memory, for training on the CPU: the system ends a process that takes too much
COPIES = 5  # weights, momenta, gradients, those of the best epoch, and one for the step; AdamW has one more
SLOT_CLASSES = 3  # the number of row counts to choose from (`slot_numbers`); each costs a recorded graph

_log = logging.getLogger(__name__)


def current_device(device: str) -> contextlib.AbstractContextManager[object]:
    """Within the context, CUDA streams, events and graphs belong to this device, even if it is not the first."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else contextlib.nullcontext()


def release_memory() -> None:
    """Free finished engines: compiled code makes them refer to themselves, so only the collector finds them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fitting_chunk(configs: Sequence[Config], train: ScanSet, val: ScanSet, execution: Execution) -> int:
    """The most configurations to train together: as many as asked for, on the CPU at most what its memory holds."""
    # A card says when its memory runs out, and the chunk is then halved; a machine ends the process.
    wanted = min(execution.chunk or len(configs), len(configs))
    free = machine_memory()[1]
    if torch.device(execution.device).type != "cpu" or free is None or wanted == 1:
        return wanted
    stack = Stack.of(configs[:1], train.width, "cpu", execution.dtype)
    engine = PackedEngine(stack, train, val, configs[0].batch_size, execution.precision)
    weights = sum(value.nbytes for value in engine.parameters.values())
    copies = COPIES + (configs[0].optimizer == "adamw")
    heaviest = heaviest_batch(train.lengths, configs[0].batch_size, _orders(configs[0], train, configs[0].seed))
    fits = int(MEMORY_SHARE * free / (copies * weights + engine.saved_bytes(heaviest)))
    if fits < wanted:
        _log.warning("memory holds %d of %d configurations together; they are trained in parts", max(1, fits), wanted)
    return max(1, min(wanted, fits))


def choose_engine(
    configs: Sequence[Config], train: ScanSet, val: ScanSet, execution: Execution, seed: int, epochs: int
) -> Engine:
    """The engine that was asked for; without a wish, the one that ends first, or packed where the others cannot run."""
    config, device = configs[0], torch.device(execution.device)
    stack = Stack.of(configs, train.width, device, execution.dtype)
    packed = PackedEngine(stack, train, val, config.batch_size, execution.precision)
    if not execution.slotted or (execution.engine is None and _is_little_work(packed, epochs)):
        return packed
    del packed
    orders = _orders(config, train, seed)
    slots = slot_numbers(train.lengths.cpu(), config.batch_size, orders, classes=SLOT_CLASSES)
    try:
        engine = SlottedEngine(stack, train, val, config.batch_size, execution.precision, slots)
        if execution.engine == "compiled":
            engine.compile()
        else:
            engine.prepare()
        return engine
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        reason = f"the {execution.engine or 'recorded'} engine cannot run {config.method} here ({describe(error)})"
        if execution.engine is not None:
            raise UserError(f"{reason}; leave --engine out, and another one takes over") from error
        _log.warning("%s; the packed engine takes over, which is slower", reason)
    release_memory()
    return PackedEngine(stack, train, val, config.batch_size, execution.precision)


def _orders(config: Config, train: ScanSet, seed: int) -> Iterator[Tensor]:
    draw = draw_orders(len(train.lengths), seed)
    return (order for _, (order, _) in zip(range(config.epochs), draw, strict=False))


def _is_little_work(packed: PackedEngine, epochs: int) -> bool:
    """Whether the packed engine would end all its epochs before another one is ready; not if it cannot run at all."""
    try:
        return epochs * packed.steps * packed.time_step() < RECORDING_SECONDS
    except Exception as error:
        _log.debug("the packed engine cannot be timed (%s)", describe(error))
    release_memory()
    return False


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, cut to a readable length."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}".removesuffix(": ")


def compiled_seconds(rest: float) -> float | None:
    """The time of work that takes `rest` seconds recorded if it is compiled first; None where that is not less."""
    compiled = COMPILING_SECONDS + COMPILED_SHARE * rest
    return compiled if compiled < rest else None


class Compiler:
    """Compiles an engine's step once, when the rest of the training takes longer than compiling would."""

    def __init__(self, engine: Engine, execution: Execution) -> None:
        self.engine = engine if execution.engine is None and isinstance(engine, SlottedEngine) else None
        self.begin: float | None = None

    def after_epoch(self, left: int) -> None:
        """Decide after the second epoch, because the first one also records steps; `left` is the number to come."""
        if self.engine is None:
            return
        synchronize(self.engine.device)
        if self.begin is None:
            self.begin = time.monotonic()
            return
        engine, self.engine = self.engine, None
        seconds = compiled_seconds(left * (time.monotonic() - self.begin))
        if seconds is None:
            return
        try:
            engine.compile(every=FILLING_SHARE * seconds > (len(engine.rows) - 1) * COMPILING_SECONDS)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.warning("compiling the step failed (%s); the recorded step goes on, slower", describe(error))
