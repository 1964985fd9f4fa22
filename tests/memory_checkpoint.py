"""A checkpoint in memory, for tests of sweeps that are interrupted and resumed."""

from normal_guidance.sweep.sweep import StateFile, SweepState


class MemoryCheckpoint(StateFile):
    """Keeps every state, due every two epochs; with `interrupt_at`, saving that state raises KeyboardInterrupt."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        super().__init__()
        self.saved: list[SweepState] = []
        self.interrupt_at = interrupt_at

    def load(self, fresh: SweepState) -> SweepState:
        return self.saved[-1] if self.saved else fresh

    def save(self, state: SweepState) -> None:
        self._epochs, self.last = 0, state
        self.saved.append(state)
        if len(self.saved) == self.interrupt_at:
            raise KeyboardInterrupt

    def due(self) -> bool:
        self._epochs += 1
        return self._epochs >= 2
