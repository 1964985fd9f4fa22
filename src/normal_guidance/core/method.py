"""One method: the model, its loss, and the regularizer of its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from normal_guidance.core.attention_term import Regularizer
from normal_guidance.core.prediction import ClassWeights, Prediction, classification

Loss = Callable[[Prediction, Tensor, ClassWeights], Tensor]
"""Maps a prediction, the scans' labels and the weights of the classes to the loss of classification."""

GUIDANCE = "ng"  # the regularizer of the paper, Normal Guidance

PAPER_NAMES = {("abmil", GUIDANCE): "ng", ("transmil", GUIDANCE): "mhng"}
"""The paper's names of regularized methods; all others are called MODEL_REGULARIZER."""


@dataclass(frozen=True)
class Method:
    """One row of the tables of methods: how to build the model, and how to train it.

    Example:
        >>> from normal_guidance.core.methods import METHODS
        >>> METHODS["ng"].guided, METHODS["ng"].model, type(METHODS["ng"].build(8)).__name__
        (True, 'abmil', 'ABMIL')
    """

    name: str
    title: str
    build: Callable[..., nn.Module]
    """Makes the model of a number of features and, by keyword, the options that it has."""
    regularizer: str | None = None
    """The term that its attention is trained with, a name in `core.regularizers.REGULARIZERS`."""
    model: str = ""
    """The name of the same method without its regularizer; its own name where it has none."""
    loss: Loss = classification
    """The loss of classification; methods with several outputs have their own."""
    scores_scans: bool = True
    pool: Callable[[Tensor], Tensor] | None = None
    """Pools a scan's slices to one row, for methods that pool without parameters; the rest is logistic regression."""
    unpenalized: tuple[str, ...] = ()
    """Names of parameters without L1 penalty; in the paper's methods all are penalised, biases included."""
    when: str = ""
    """When to use it, in a sentence; the paper's methods have none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model or self.name)

    @property
    def guided(self) -> bool:
        """Whether it is trained with Normal Guidance."""
        return self.regularizer == GUIDANCE

    @property
    def attends(self) -> bool:
        """Whether its attention is trained, so that a regularizer can act on it."""
        return self.scores_scans and self.pool is None

    def regularized(self, term: Regularizer) -> Method:
        """The same method, trained with this term.

        Example:
            >>> from normal_guidance.core.methods import METHODS
            >>> from normal_guidance.core.regularizers import REGULARIZERS
            >>> METHODS["smap"].regularized(REGULARIZERS["entropy"]).name
            'smap_entropy'
        """
        name = PAPER_NAMES.get((self.model, term.name), f"{self.model}_{term.name}")
        return replace(self, name=name, title=f"{self.title} + {term.title}", regularizer=term.name, when="")
