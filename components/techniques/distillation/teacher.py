"""The teacher of a distillation: a frozen model next to the one that trains.

It is no part of the trained model, so checkpoints, exports, gradients and sharding never see it.
Each rank has it complete, in the precision of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from steadytrain.components.shared.chunks import comparison_rows
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.techniques.base import IGNORED, Batch, Row
from steadytrain.components.techniques.distillation import DistillationConfig
from steadytrain.components.techniques.distillation.loss import (
    COLUMNS,
    Comparison,
    HiddenStates,
    Teaching,
    answers_in,
    top_answers,
)
from steadytrain.components.techniques.modules import to_device

FIELD = "training.distillation.teacher"

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Returns the logits (chosen, classes or vocabulary) of some rows, given their indices."""


class Forward(Protocol):
    """Runs a model's forward pass."""

    def __call__(
        self, model: torch.nn.Module, batch: Batch, *, states: bool = False
    ) -> tuple[Any, LogitsOf]:
        """Return Transformers' output, and what gives the logits of some of its rows.

        Args:
            states: whether the output includes the states of all layers.
        """


class Teacher:
    """Answers with logits.

    Args:
        model: frozen, in evaluation mode.
        part: of the student, which compares hidden states; None if none are compared.
    """

    def __init__(
        self, model: torch.nn.Module, settings: DistillationConfig, part: HiddenStates | None = None
    ) -> None:
        self.model, self.settings, self.part = model, settings, part
        self._device: torch.device | None = None

    @torch.no_grad()
    def teach(self, forward: Forward, batch: Batch) -> Teaching:
        """Return what the teacher says about a micro-batch."""
        device = batch["targets"].device
        if self._device != device:
            # If memory runs out, some of the weights have moved, so they cannot be asked.
            self.model.to(device)
            self._device = device
        given, logits = forward(self.model, batch, states=self.part is not None)
        return Teaching(logits, self.settings, self._comparison(given))

    def _comparison(self, given: Any) -> Comparison | None:
        """Return the comparison with the states that the model returned."""
        if self.part is None:
            return None
        states = [given.hidden_states[layer] for _, layer in self.part.pairs]
        return Comparison(self.part, states, self.settings.hidden.weight)


def stored_teaching(batch: Batch, settings: DistillationConfig) -> Teaching | None:
    """Return what is stored about a micro-batch; None if nothing is."""
    answers = answers_in(batch, IGNORED)
    return None if answers is None else Teaching(answers, settings)


def check_vocabulary(teacher: Any, student: Any, address: str | None) -> None:
    """Check that two language models have equally many tokens.

    Raises:
        BadInput: they do not.
    """
    theirs, ours = (model.get_input_embeddings().num_embeddings for model in (teacher, student))
    if theirs != ours:
        raise BadInput(
            f"{FIELD} = {address!r}: it has {theirs} tokens, and the student {ours}",
            remedy="use a teacher and a student with the same vocabulary, such as two sizes of one "
            "family of models",
        )


def check_labels(teacher: Any, labels: list[str], address: str | None, field: str) -> None:
    """Check that a classifier has the labels of the data, in the same order.

    Args:
        field: names the address in errors.

    Raises:
        BadInput: it does not.
    """
    names = teacher.config.id2label
    theirs = [names.get(index) for index in range(teacher.config.num_labels)]
    if theirs != labels:
        raise BadInput(
            f"{field} = {address!r}: its labels are {', '.join(map(str, theirs))}, and the data's "
            f"are {', '.join(labels)}",
            remedy="train that model on these labels, or name its labels in data.labels",
        )


class AnsweringTeacher:
    """Answers rows.

    Args:
        collate: makes a micro-batch of rows. Its targets are in the order of the rows.
        outputs: number of tokens or labels.

    Raises:
        BadInput: there are fewer of them than are to be stored.
    """

    def __init__(
        self,
        teacher: Teacher,
        forward: Forward,
        collate: Callable[[Sequence[Row]], Batch],
        outputs: int,
    ) -> None:
        top_k = teacher.settings.top_k
        assert top_k is not None, "answers are stored"
        if top_k > outputs:
            raise BadInput(
                f"training.distillation.top_k = {top_k}: the teacher has {outputs} to choose from",
                remedy=f"set it to {outputs} or less",
            )
        self.teacher, self.forward, self.collate = teacher, forward, collate
        self.top_k, self.block = top_k, comparison_rows(outputs)

    @torch.no_grad()
    def answer(self, rows: Sequence[Row], device: torch.device) -> list[Row]:
        """Return the answers of each row, as flat lists."""
        counts = [len(_places(self.collate([row]))) for row in rows]
        batch = to_device(self.collate(rows), device)
        teaching, places, answers = self.teacher.teach(self.forward, batch), _places(batch), []
        for start in range(0, max(len(places), 1), self.block):
            logits = teaching.logits(places[start : start + self.block])
            assert isinstance(logits, torch.Tensor), "this teacher is a model"
            top = top_answers(logits, self.top_k, self.teacher.settings.temperature)
            answers.append((top.classes.int(), top.likely, top.rest))
        whole = [torch.cat(part).cpu().numpy() for part in zip(*answers, strict=True)]
        return [
            {
                name: part[end - count : end].ravel()
                for name, part in zip(COLUMNS, whole, strict=True)
            }
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]


def _places(batch: Batch) -> torch.Tensor:
    """Return where a micro-batch has targets."""
    targets: torch.Tensor = batch["targets"].flatten()
    return (targets != IGNORED).nonzero().squeeze(1)
