"""Regularizers: terms on attention, each in a file of its own, that can be added to any method that attends.

A file defines an `AttentionTerm` and `REGULARIZER`, and is called like it.  Nothing else is needed: `--regularizer`,
the methods MODEL_REGULARIZER and the tests find it.
"""

from __future__ import annotations

import sys

from normal_guidance.base.system import one_per_file
from normal_guidance.core.attention_term import Regularizer

REGULARIZERS: dict[str, Regularizer] = one_per_file(sys.modules[__name__], "REGULARIZER")
