"""What a teacher says about rows, short enough to be stored: its most likely classes.

The teacher's other classes count as one, "rest": their total probability is known, and how it is
spread over them is left to the student. So the stored answer says nothing that the teacher did not
say. Scaling the most likely classes up to a sum of 1 would: it teaches too high probabilities
(Anshumann et al. 2025, "Sparse Logit Sampling"). The divergence of the joined classes is at most
that of all classes (the log sum inequality), and equals it if all are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from steadytrain.components.tasks.base import Batch, Row

CLASSES, LIKELY, REST = "teacher_classes", "teacher_likely", "teacher_rest"
"""Columns of stored rows, and entries of a micro-batch."""
COLUMNS: Final = (CLASSES, LIKELY, REST)
_IMPOSSIBLE: Final = -1e4
"""Logarithm of a probability that is 0 in 32 bits."""


@dataclass(frozen=True)
class TopAnswers:
    """The most likely classes (or tokens) of a teacher, for each target.

    classes: (targets, K), integers. likely: (targets, K), float32, the logarithms of their softened
        probabilities. rest: (targets), float32, that of all other classes together; minus infinity
        if there are none.
    """

    classes: torch.Tensor
    likely: torch.Tensor
    rest: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> TopAnswers:
        return TopAnswers(self.classes[rows].long(), self.likely[rows], self.rest[rows])

    def completed(self, own: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of the probabilities of all classes, (targets, classes).

        The rest is spread as the student spreads it, which makes the divergence of all classes that
        of the joined ones; its gradient too, because the student's shares of the rest cancel out.

        Args:
            own: the student's.
        """
        others = own.scatter(1, self.classes, -math.inf).logsumexp(1)
        # A class without any probability would make the divergence infinite.
        shift = self.rest.clamp(min=_IMPOSSIBLE) - others
        return (own + shift.unsqueeze(1)).scatter(1, self.classes, self.likely)


def top_answers(logits: torch.Tensor, top_k: int, temperature: float) -> TopAnswers:
    """Return the most likely classes.

    Args:
        logits: (targets, classes).
    """
    answers = (logits.float() / temperature).log_softmax(1)
    likely, classes = answers.topk(top_k, dim=1)
    rest = answers.scatter(1, classes, -math.inf).logsumexp(1)
    return TopAnswers(classes, likely, rest)


def collate_answers(rows: Sequence[Row]) -> Batch:
    """Return the stored answers of rows as entries of a micro-batch; none if there are none."""
    if REST not in rows[0]:
        return {}
    classes, likely, rest = (
        torch.from_numpy(np.concatenate([np.asarray(row[name]) for row in rows]))
        for name in COLUMNS
    )
    shape = (len(rest), len(classes) // max(len(rest), 1))
    return {CLASSES: classes.view(shape), LIKELY: likely.view(shape), REST: rest}


def answers_in(batch: Batch, ignored: int) -> Callable[[torch.Tensor], TopAnswers] | None:
    """Return what gives the answers for places in "targets"; None if none are stored."""
    if REST not in batch:
        return None
    found = TopAnswers(*(batch[name] for name in COLUMNS))
    numbers = (batch["targets"].flatten() != ignored).cumsum(0) - 1
    return lambda places: found[numbers[places]]
